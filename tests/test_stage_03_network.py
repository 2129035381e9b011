# covers: 03_download_model.py, lib/hub/client.py, lib/hub/transfer.py
"""Stage 03 with a slow, busy, proxied or missing network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import StageRunner
from tests.hub_models import NAME, SCRIPT, SHARDS, TARGET, TOKEN, find_files_with, list_model_dirs
from tests.hub_server import HubServer


def fetched_all(where: Path, hub: HubServer) -> bool:
    files = {path.name: path.read_bytes() for path in (where / TARGET).iterdir()}
    return all(
        content == hub.repos[NAME].files[name]
        for name, content in files.items()
        if name != "manifest.json"
    )


@pytest.mark.slow
def test_busy_answers_and_broken_streams_are_waited_out(hub, stage: StageRunner, tmp_path):
    repo = hub.repos[NAME]
    repo.busy = {
        "": [(503, {})],
        SHARDS[0]: [(429, {"Retry-After": "6"})],
        SHARDS[1]: [(503, {})],
        "config.json": [(429, {"RateLimit": '"resolvers";r=0;t=2'})],
    }
    repo.busy_storage = {SHARDS[1]: [(500, {})], SHARDS[0]: [(429, {"Retry-After": "0"})]}
    repo.cut = {SHARDS[0]: 70_000, SHARDS[1]: 100_000}
    began = time.monotonic()
    done = stage(SCRIPT, "--model-name", NAME)
    assert time.monotonic() - began > 5  # as long as the Hub asked for
    assert "the Hub limits our requests" in done.stdout  # printed by huggingface_hub
    assert "to wait 6.0 s" in done.stdout
    assert "HTTP Error" not in done.stdout + done.stderr
    assert fetched_all(tmp_path, hub)
    assert not any(repo.busy.values()) and not any(repo.busy_storage.values())


def test_a_hub_that_stays_busy_is_reported(hub, stage: StageRunner, tmp_path):
    hub.repos[NAME].busy[""] = [(503, {}), (403, {})]
    error = stage(SCRIPT, "--model-name", NAME, expect=2).stderr
    assert "HTTP status 403" in error and not list_model_dirs(tmp_path)


def test_a_storage_without_ranges(hub, stage: StageRunner, tmp_path):
    hub.repos[NAME].no_ranges = True
    hub.repos[NAME].cut = {SHARDS[0]: 70_000}
    stage(SCRIPT, "--model-name", NAME)
    assert fetched_all(tmp_path, hub)


def test_a_proxy_in_the_way(hub, stage: StageRunner, tmp_path):
    no_proxy = {"NO_PROXY": "", "no_proxy": ""}
    dead = {**no_proxy, "http_proxy": "http://user:pa55word@127.0.0.1:9"}
    error = stage(SCRIPT, "--model-name", NAME, env=dead, expect=2).stderr
    assert "proxy in http_proxy" in error
    assert "pa55word" not in error and "Traceback" not in error
    with HubServer() as proxy:  # answers CONNECT with 501
        through = {**no_proxy, "https_proxy": proxy.url, "HF_ENDPOINT": "https://127.0.0.1:9"}
        error = stage(SCRIPT, "--model-name", NAME, env=through, expect=2).stderr
    assert "https://127.0.0.1:9" in error and "proxy" in error
    bad = {**no_proxy, "http_proxy": "ftp://127.0.0.1:9"}
    error = stage(SCRIPT, "--model-name", NAME, env=bad, expect=2).stderr
    assert "HTTP_PROXY" in error
    stage(SCRIPT, "--model-name", NAME, env={**dead, "no_proxy": "127.0.0.1"})
    assert fetched_all(tmp_path, hub)


def test_a_certificate_that_is_not_trusted(hub, stage: StageRunner, tmp_path):
    if not shutil.which("openssl"):
        pytest.skip("needs openssl to make a certificate")
    pem = tmp_path / "both.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=hub",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-keyout",
            pem,
            "-out",
            tmp_path / "cert.pem",
        ],
        check=True,
        capture_output=True,
    )
    with pem.open("a") as file:
        file.write((tmp_path / "cert.pem").read_text())
    with HubServer(pem) as server:
        server.repos = hub.repos
        at = {"HF_ENDPOINT": server.url}
        error = stage(SCRIPT, "--model-name", NAME, env=at, expect=2).stderr
        assert "SSL_CERT_FILE" in error and "Traceback" not in error
        missing = {**at, "SSL_CERT_FILE": "nowhere.pem"}
        error = stage(SCRIPT, "--model-name", NAME, env=missing, expect=2).stderr
        assert "SSL_CERT_FILE" in error and "Traceback" not in error
        stage(SCRIPT, "--model-name", NAME, env={**at, "SSL_CERT_FILE": str(tmp_path / "cert.pem")})
    assert fetched_all(tmp_path, hub)


def test_the_stored_login_is_used_and_a_bad_token_is_not_printed(hub, stage: StageRunner, tmp_path):
    hub.repos[NAME].token = TOKEN
    home = Path(os.environ["HF_HOME"])
    home.mkdir()
    (home / "token").write_text(TOKEN + "\n")
    done = stage(SCRIPT, "--model-name", NAME)
    assert fetched_all(tmp_path, hub) and TOKEN not in done.stdout + done.stderr
    assert find_files_with(tmp_path, TOKEN) == [home / "token"]
    hub.repos[NAME].busy[""] = [(401, {})]
    refused = stage(SCRIPT, "--model-name", NAME, "--overwrite", "--token", "hf_Other", expect=2)
    assert "hf_Other" not in refused.stdout + refused.stderr


def test_a_password_in_the_address_is_not_shown(hub, stage: StageRunner, tmp_path):
    secret = hub.url.replace("//", "//user:pa55word@")
    for arguments, code in ((("--dry-run",), 0), ((), None)):
        done = stage(
            SCRIPT, "--model-name", NAME, *arguments, env={"HF_ENDPOINT": secret}, expect=code
        )
        assert "pa55word" not in done.stdout + done.stderr
    down = stage(
        SCRIPT,
        "--model-name",
        "org/x",
        expect=2,
        env={"HF_ENDPOINT": "http://user:pa55word@127.0.0.1:9"},
    )
    assert "unreachable" in down.stderr and "pa55word" not in down.stdout + down.stderr
    assert not find_files_with(tmp_path, "pa55word")


def test_options_from_a_file_hold_no_token_in_the_manifest(hub, stage: StageRunner, tmp_path):
    hub.repos[NAME].gated = True
    hub.repos[NAME].token = TOKEN
    (tmp_path / "run.yaml").write_text(f"model_name: {NAME}\ntoken: {TOKEN}\n")
    done = stage(SCRIPT, "--config", "run.yaml")
    (tmp_path / "run.yaml").unlink()
    assert TOKEN not in done.stdout + done.stderr and not find_files_with(tmp_path, TOKEN)
    record = json.loads((tmp_path / TARGET / "manifest.json").read_text())
    assert record["options"]["token"] == "[redacted]"
