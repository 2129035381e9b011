# covers: lib/core/options.py
"""Options: spellings, aliases, YAML and its precedence, errors, and secrets."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import yaml

from lib.core import commands, log, options, paths
from lib.core.errors import Problems, UsageError
from lib.core.options import Options, Parser


@pytest.fixture
def parser() -> Parser:
    parser = Parser("a stage")
    add = parser.add_argument
    add("-e", "--experiment-name", metavar="NAME", help="name")
    add("--src-dir", type=Path, default=Path("raw_text"), help="directory")
    lr = add("--lr", "--max-lr", type=options.positive, default=3e-5, help="rate")
    options.add_aliases(parser, lr, ["--learning-rate", "--optimizer.lr"])
    add("--num-dirs", type=options.positive_int, default=20, help="splits")
    add("--include", action="append", default=[], help="pattern")
    add("--fields", type=lambda text: text.split(","), action="extend", default=[], help="keys")
    add("--cpu-offload", type=options.on_off, default=False, help="on or off")
    add("--mode", choices=("copy", "symlink"), default="copy", help="way")
    add("--keep-source", action="store_true", help="keep")
    options.add_aliases(parser, add("--token", help="secret"), ["--hf-token"])
    parser.add_common("work")
    return parser


@pytest.fixture
def with_yaml(parser: Parser, tmp_path: Path):
    """Return with_yaml(text, *argv), which parses a config file and a command line."""

    def parse(text: str, *argv: str) -> Options:
        config = tmp_path / "run.yaml"
        config.write_text(text)
        return parser.parse([*argv, "--config", str(config)])

    return parse


@pytest.mark.parametrize("argv", [["--src-dir", "a_b"], ["--src_dir", "a_b"], ["--src_dir=a_b"]])
def test_both_spellings_are_accepted_and_values_kept(parser: Parser, argv: list[str]) -> None:
    assert parser.parse(argv).src_dir == Path("a_b")


def test_an_empty_path_is_refused(parser: Parser, with_yaml) -> None:
    """It comes from a variable that is not set, and would mean the current directory."""
    for refused in (lambda: parser.parse(["--src-dir", ""]), lambda: with_yaml("src_dir: ''")):
        with pytest.raises(UsageError, match="--src-dir: expected a path"):
            refused()


def test_abbreviations_are_unknown(parser: Parser) -> None:
    with pytest.raises(UsageError, match="unknown option --src"):
        parser.parse(["--src", "x"])


def test_command_line_beats_yaml_beats_default(with_yaml) -> None:
    got = with_yaml("src_dir: of_yaml\nnum-dirs: 3\n", "--num_dirs", "7")
    assert (got.src_dir, got.num_dirs, got.mode) == (Path("of_yaml"), 7, "copy")


def test_two_names_of_an_option_must_agree(with_yaml) -> None:
    for text, names in (
        ("lr: 1e-4\nmax_lr: 2e-4", ("lr", "max_lr")),
        ("src-dir: a\nsrc_dir: b", ("src-dir", "src_dir")),
        ("lr: 1e-4\nlearning_rate: 2e-4", ("lr", "learning_rate")),
        ("lr: 1e-4\nmax_lr: null\nlearning_rate: 3e-4", ("lr", "learning_rate")),
        ("include: [a]\ninclude_: x", ()),
    ):
        with pytest.raises(UsageError) as caught:
            with_yaml(text)
        assert all(f"'{name}'" in caught.value.problem for name in names)
    assert with_yaml("lr: 1e-4\nmax_lr: 0.0001\nlearning_rate:").lr == 1e-4
    assert with_yaml("lr: 1e-4\nmax_lr: 2e-4", "--lr", "3e-4").lr == 3e-4
    with pytest.raises(UsageError, match=r"line 2, column 1: .*twice"):
        with_yaml("lr: 1e-4\nlr: 2e-4")


def test_errors_quote_the_name_that_was_typed(parser: Parser, with_yaml) -> None:
    with pytest.raises(UsageError) as caught:
        parser.parse(["--learning_rate", "x"])
    assert "--learning_rate, which is --lr" in caught.value.render()
    with pytest.raises(UsageError) as caught:
        with_yaml("learning_rate: -1\nnum_dirs: 0")
    assert caught.value.render().count("learning_rate, which is --lr") == 1
    with pytest.raises(UsageError, match="'learning_rate' takes one value"):
        with_yaml("learning_rate: [1, 2]")
    parser.parse(["--learning_rate", "1"])
    assert "typed:    --learning_rate" in UsageError("--lr 1 is too large").render()
    assert "typed:" not in UsageError("--lr-scheduler is odd").render()
    parser.parse(["--lr", "1"])
    assert "typed:" not in UsageError("--lr 1 is too large").render()


def test_errors_do_not_quote_overridden_names_of_a_file(with_yaml) -> None:
    for text in ("learning_rate: 2e-4", "learning_rate: null"):
        with_yaml(text, "--lr", "3e-4")
        assert "typed:" not in UsageError("--lr is odd").render()
    with_yaml("learning_rate: 2e-4", "--learning_rate", "3e-4")
    assert "--learning_rate, which is --lr" in UsageError("--lr is odd").render()


def test_an_alias_on_the_command_line_beats_yaml(with_yaml) -> None:
    assert with_yaml("lr: 1.0\n", "--max-lr", "2").lr == 2
    assert with_yaml("experiment-name: of_yaml\n", "-e", "flag").experiment_name == "flag"
    assert with_yaml("experiment-name: of_yaml\n", "-eflag").experiment_name == "flag"


@pytest.mark.parametrize("name", ["lr", "src_dir", "num_dirs"])
def test_a_value_that_reads_like_an_option_does_not_hide_the_yaml(with_yaml, name: str) -> None:
    got = with_yaml("lr: 0.5\nsrc_dir: of_yaml\nnum_dirs: 3\n", "-e", name)
    assert (got.experiment_name, got.lr, got.src_dir, got.num_dirs) == (
        name,
        0.5,
        Path("of_yaml"),
        3,
    )


@pytest.mark.parametrize(
    ("text", "argv", "expected"),
    [
        ("include: ['*.py', '*.md']", (), ["*.py", "*.md"]),
        ("include: '*.py'", (), ["*.py"]),
        ("include: ['*.py', '*.md']", ("--include", "*.txt"), ["*.txt"]),
        ("include: []", (), []),
    ],
)
def test_repeatable_options_are_replaced_not_mixed(with_yaml, text, argv, expected) -> None:
    assert with_yaml(text, *argv).include == expected


def test_comma_separated_options_take_a_list_or_a_string(with_yaml) -> None:
    assert with_yaml("fields: [a, b.c]").fields == with_yaml("fields: a,b.c").fields == ["a", "b.c"]


def test_one_parse_leaves_nothing_for_the_next(parser: Parser, with_yaml) -> None:
    with_yaml("include: ['*.py']\nfields: a")
    assert parser.parse([]).include == parser.parse([]).fields == []


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("lr: 1e-4", "lr", 1e-4),  # a string to YAML 1.1
        ("lr: 0.0001", "lr", 1e-4),
        ("cpu_offload: on", "cpu_offload", True),  # a boolean to YAML 1.1
        ("cpu_offload: 'on'", "cpu_offload", True),
        ("cpu_offload: false", "cpu_offload", False),
        ("keep_source: true", "keep_source", True),
        ("keep_source: false", "keep_source", False),
        ("mode: symlink", "mode", "symlink"),
        ("num_dirs:", "num_dirs", 20),  # null means not given
        ("experiment_name: -e", "experiment_name", "-e"),
        ("experiment_name: 2024-01-31", "experiment_name", "2024-01-31"),
        # YAML 1.1 reads these as 8, 7, 1.1, 10 and 90.
        ("num_dirs: 010", "num_dirs", 10),
        ("experiment_name: 007", "experiment_name", "007"),
        ("experiment_name: 1.10", "experiment_name", "1.10"),
        ("experiment_name: 1_0", "experiment_name", "1_0"),
        ("experiment_name: 1:30", "experiment_name", "1:30"),
        ("include: [1.10, 010]", "include", ["1.10", "010"]),
    ],
)
def test_yaml_values(with_yaml, text: str, name: str, value: object) -> None:
    got = getattr(with_yaml(text), name)
    assert got == value and type(got) is type(value)


def test_recorded_options_are_a_config(parser: Parser, tmp_path: Path) -> None:
    parser.add_argument("--profile", type=options.span, help="steps")
    opts = parser.parse(
        [
            "-e",
            "one",
            "--lr",
            "1e-3",
            "--token",
            "x",
            "--dry-run",
            "--include",
            "a",
            "--include",
            "b",
            "--profile",
            "2:4",
        ]
    )
    content = {"launch": "1", "options": options.to_plain_values(opts), "versions": {}, "argv": []}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content))
    again = parser.parse(["--config", str(tmp_path / "config.yaml"), "-e", "two"])
    assert (again.experiment_name, again.lr, again.token, again.dry_run, again.profile) == (
        "two",
        1e-3,
        None,
        False,
        (2, 4),
    )
    assert again.include == ["a", "b"] and again.src_dir == opts.src_dir


def test_recorded_options_that_no_longer_exist_are_ignored(
    parser: Parser, tmp_path: Path, capsys
) -> None:
    log.setup()
    recorded = {"num_workers": 8, "lr": 0.5, "unknown": 1, "suite_freq": 7, "on_end": "touch x"}
    recorded |= {"sample_freq": 500, "plan_write_gbps": 2.0, "token_reads": "mmap", "compare": None}
    content = {"stage": Path(sys.argv[0]).name, "options": recorded, "versions": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    assert parser.parse(["--config", str(tmp_path / "manifest.json")]).lr == 0.5
    printed = [
        line for line in capsys.readouterr().out.splitlines() if "manifest.json contains" in line
    ]
    assert [line.partition("contains ")[2].partition(",")[0] for line in printed] == [
        "on_end",
        "suite_freq",
        "unknown",
    ]  # and not those that had their defaults
    assert "--on-end COMMAND" in printed[0] and "--eval-freq" in printed[1]
    (tmp_path / "typed.yaml").write_text("lr: 0.5\nsample_freq: 500\n")
    assert parser.parse(["--config", str(tmp_path / "typed.yaml")]).lr == 0.5
    assert "sample_freq" in capsys.readouterr().out


def test_recorded_options_that_the_result_needs_are_refused(parser: Parser, tmp_path: Path) -> None:
    defaults = {"lr": 0.5, "language": [], "near_threshold": 0.8, "decontaminate_share": 0.5}
    path = tmp_path / "manifest.json"
    for more, refused in (({}, []), ({"language": ["en"], "keep_top": 0.1}, ["language", "keep"])):
        content = {"stage": "x", "options": defaults | more, "versions": {}}
        path.write_text(json.dumps(content))
        if not refused:
            assert parser.parse(["--config", str(path)]).lr == 0.5
            continue
        with pytest.raises(UsageError) as error:
            parser.parse(["--config", str(path)])
        assert all(name in str(error.value) for name in (*refused, "lib.curate DATASET"))
    (tmp_path / "typed.yaml").write_text("lr: 0.5\nmask: email\n")
    with pytest.raises(UsageError, match="mask"):
        parser.parse(["--config", str(tmp_path / "typed.yaml")])
    (tmp_path / "typed.yaml").write_text("lr: 0.5\nunknown: 1\n")  # a typo is reported
    with pytest.raises(UsageError, match="unknown key 'unknown'"):
        parser.parse(["--config", str(tmp_path / "typed.yaml")])
    with pytest.raises(UsageError, match="unknown option --sample-freq") as caught:
        parser.parse(["--sample_freq", "5"])
    assert "--eval-freq" in caught.value.hint


def test_a_typed_experiment_path_sets_its_directory(parser: Parser, tmp_path: Path) -> None:
    parser.add_argument("--save-dir", type=Path, help="place")
    (tmp_path / "c.yaml").write_text("save-dir: outputs\nexperiment-name: exp\n")
    config = ["--config", str(tmp_path / "c.yaml")]
    for argv, where in (
        (["-e", "elsewhere/new"], ("elsewhere", "new")),
        (["-e", "again"], ("outputs", "again")),
        ([], ("outputs", "exp")),
        (["-e", "a/b", "--save-dir", "a"], ("a", "b")),
    ):
        opts = parser.parse([*config, *argv])
        paths.expand_save_dir(opts)
        assert (str(opts.save_dir), opts.experiment_name) == where


def test_the_manifest_of_another_stage_is_refused(
    parser: Parser, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("sys.argv", ["04_train_fsdp.py"])
    (tmp_path / "manifest.json").write_text('{"stage": "02.py", "options": {}, "versions": {}}')
    with pytest.raises(UsageError, match=r"options of 02\.py"):
        parser.parse(["--config", str(tmp_path / "manifest.json")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num_dir: 3", r"run\.yaml: .* --num-dirs"),
        ("e: x", "unknown key 'e'"),
        ("num_dirs: many", "run.yaml: --num-dirs: .*'many'"),
        ("num_dirs: 0", "run.yaml: --num-dirs: .*'0'"),
        ("num_dirs: 1:30", "run.yaml: --num-dirs: .*'1:30'"),
        ("help: true", "run.yaml: unknown key 'help'"),
        ("num_dirs: {a: 1}", "takes a plain value"),
        ("num_dirs: [1, 2]", "takes one value"),
        ("keep_source: 3", "takes true or false"),
        ("mode: teleport", "run.yaml: --mode: .*'teleport'"),
        ("config: other.yaml", "takes a plain value"),
        ("- a\n- b", "`key: value` lines"),
        ("a: [1", "is not valid YAML"),
    ],
)
def test_a_bad_config_is_reported(with_yaml, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        with_yaml(text)


def test_yaml_is_checked_even_if_the_command_line_wins(with_yaml) -> None:
    with pytest.raises(UsageError, match="unknown key"):
        with_yaml("nmu_dirs: 3", "--num-dirs", "7")


def test_required_options_may_be_typed_or_in_a_config(tmp_path: Path) -> None:
    parser = Parser("a tool")
    parser.add_argument("what", choices=("one", "other"), help="what to do")
    parser.add_argument("--job-name", required=True, metavar="J", help="name")
    parser.add_argument("--deep", action="store_true", help="more")
    parser.add_argument("--config", type=Path, metavar="FILE", help="file")
    (tmp_path / "run.yaml").write_text("deep: true")
    (tmp_path / "named.yaml").write_text("job_name: j")
    opts = parser.parse(["one", "--job-name", "x", "--config", str(tmp_path / "run.yaml")])
    assert opts.deep and opts.what == "one"
    assert parser.parse(["one", "--config", str(tmp_path / "named.yaml")]).job_name == "j"
    with pytest.raises(UsageError, match="required: what, --job-name"):
        parser.parse(["--config", str(tmp_path / "run.yaml")])


def test_a_missing_config_is_reported(parser: Parser) -> None:
    with pytest.raises(UsageError, match=r"no such file: none\.yaml"):
        parser.parse(["--config", "none.yaml"])
    with pytest.raises(UsageError, match="--config: expected one argument"):
        parser.parse(["--config"])


def test_a_config_that_is_not_text_is_reported(parser: Parser, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UsageError, match="is not valid YAML"):
        parser.parse(["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num-dir", "3"], "--num-dir; .* --num-dirs"),
        (["--src_dri=x"], "--src-dri; .* --src-dir"),
        (["word"], "unexpected argument 'word'"),
        (["-5"], "unexpected argument '-5'"),
        (["--num-dirs", "-1"], "--num-dirs: .*'-1'"),
        (["--num-dirs", "1.5"], "--num-dirs: .*'1.5'"),
        (["--lr", "nan"], "--max-lr: .*'nan'"),
        (["--lr", "inf"], "--max-lr: .*'inf'"),
        (["--cpu-offload", "maybe"], "on or off, .*'maybe'"),
        (["-e"], "expected one argument"),
    ],
)
def test_a_bad_command_line_is_reported(parser: Parser, argv: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parser.parse(argv)
    assert caught.value.run.endswith("--help")
    parser.prog = "check.py machine"
    with pytest.raises(UsageError) as caught:
        parser.parse(["--unknown"])
    assert caught.value.run.endswith(f"{sys.argv[0]} machine --help")


def test_aliases_of_other_trainers_are_accepted(parser: Parser, with_yaml) -> None:
    for argv in (["--learning_rate", "1"], ["--learning-rate=1"], ["--optimizer.lr=1"]):
        assert parser.parse(argv).lr == 1
    assert with_yaml("learning_rate: 1").lr == with_yaml("optimizer.lr: 1").lr == 1
    assert with_yaml("learning_rate: 1", "--max_lr", "2").lr == 2
    assert parser.parse(["--hf_token", "x"]).token == "x"
    for unknown in ("--per_device_train_batch_size=1", "--banana"):  # there is no --batch-size here
        with pytest.raises(UsageError) as caught:
            parser.parse([unknown])
        assert "nearest" not in caught.value.problem
    with pytest.raises(ValueError, match="--max-lr is declared twice"):
        options.add_aliases(parser, parser._option_string_actions["--token"], ["--max-lr"])


def test_errors_about_unknown_options_point_once_to_the_page_with_other_names(
    parser: Parser, with_yaml
) -> None:
    for refused in (
        lambda: parser.parse(["--run_name", "x"]),
        lambda: parser.parse(["--run_name", "x", "--banana=2"]),
        lambda: with_yaml("wandb_name: x\nbanana: 2"),
    ):
        with pytest.raises(UsageError) as caught:
            refused()
        assert caught.value.render().count("docs/how-to/coming-from.md") == 1
    assert "wandb_name" in str(caught.value) and "banana" in str(caught.value)  # all at once


def test_a_mistyped_secret_is_not_repeated(parser: Parser) -> None:
    with pytest.raises(UsageError) as caught:
        parser.parse(["--tokne=hf_secret"])
    assert "hf_secret" not in caught.value.render()


@pytest.mark.parametrize("text", ["token: [hf_secret]", "token: {a: hf_secret}"])
def test_a_secret_in_a_bad_config_is_not_repeated(with_yaml, text: str) -> None:
    with pytest.raises(UsageError, match="'token' takes") as caught:
        with_yaml(text)
    assert "hf_secret" not in caught.value.render()


def test_stored_options_contain_no_secrets(parser: Parser) -> None:
    opts = parser.parse(["--token", "hf_secret", "--src-dir", "a"])
    assert opts.token == "hf_secret"
    stored = options.to_plain_values(opts)
    assert stored["token"] == "[redacted]" and stored["src_dir"] == "a"
    assert options.to_plain_values(parser.parse([]))["token"] is None
    argv = ["s.py", "--token", "hf_secret", "--api_key=k", "--train-tokenizer", "dir", "--token=x"]
    assert commands.redact_argv(argv) == [
        "s.py",
        "--token",
        "[redacted]",
        "--api_key=[redacted]",
        "--train-tokenizer",
        "dir",
        "--token=[redacted]",
    ]


@pytest.mark.parametrize(
    "option",
    [
        "--token-secret",
        "--token_secret",
        "--image-pull-secret",
        "--creation-token",
        "--secret-name",
        "--password-file",
        "--eos_token",
    ],
)
def test_names_and_paths_of_secrets_are_shown(option: str) -> None:
    """Otherwise a printed command with such an option could not be pasted."""
    for words in ([option, "hub"], [f"{option}=hub"]):
        assert commands.redact_argv(words) == words
        assert commands.shell("x", *words) == " ".join(["x", *words])


@pytest.mark.parametrize(
    "option",
    [
        "--token",
        "--hf-token",
        "--HF_TOKEN",
        "--hub_token",
        "--client-secret",
        "--wandb-api-key",
        "--password",
    ],
)
def test_a_secret_of_any_name_is_not_shown(option: str) -> None:
    for words in ([option, "hf_1"], [f"{option}=hf_1"]):
        assert "hf_1" not in " ".join(commands.redact_argv(words))
        assert commands.shell(*words).endswith('"$HF_TOKEN"')


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("HF_TOKEN=abc", "HF_TOKEN=[redacted]"),
        ("--env=DB_PASSWORD=1=2", "--env=DB_PASSWORD=[redacted]"),
        ("https://user:p@w@host/a@b", "https://[redacted]@host/a@b"),
        ("MODE=abc", "MODE=abc"),
        ("--find-links=https://u:pw@host", "--find-links=https://[redacted]@host"),
        ("my_token=0.5", "my_token=0.5"),
        ("https://host/a", "https://host/a"),
    ],
)
def test_secrets_in_variables_and_urls_are_not_shown(word: str, shown: str) -> None:
    assert commands.redact_argv(["x", "--env", word]) == ["x", "--env", shown]
    assert commands.redact_argv(["--add-bos-token", word]) == ["--add-bos-token", shown]
    if shown != word:
        assert "abc" not in commands.shell(word) and "pw" not in commands.shell(word)
    assert commands.shell("--env", "KEY_PASSWORD=x") == '--env KEY_PASSWORD="$KEY_PASSWORD"'


@pytest.mark.parametrize(
    ("names", "text", "expected"),
    [
        (("bf16", "fp16", "fp32"), "bfloat16", "bf16"),
        (("bf16", "fp16", "fp32"), "bf16", "bf16"),
        (("bf16", "fp16", "fp32"), "float32", "fp32"),
        (("bf16", "fp16", "fp32"), "FP16", "fp16"),
        (("bfloat16", "float32", "float16"), "bf16", "bfloat16"),
        (("bfloat16", "float32", "float16"), "fp32", "float32"),
        (("bfloat16", "float32", "float16"), "float16", "float16"),
        (("bf16",), "int8", "int8"),
        (("bf16",), "float16", "float16"),  # choices refuses them
    ],
)
def test_a_dtype_has_two_names_and_one_value(names, text: str, expected: str) -> None:
    assert options.dtype(*names)(text) == expected


def test_identity_omits_options_that_do_not_affect_the_result(parser: Parser) -> None:
    one = parser.parse(["--num-workers", "1", "--overwrite", "--no-progress"])
    other = parser.parse(["--num-workers", "2", "--dry-run"])
    assert options.identity(one, "src_dir") == options.identity(other, "src_dir")
    assert "src_dir" not in options.identity(one, "src_dir")
    assert options.identity(one)["num_dirs"] == 20


def test_help_shows_every_default_once(parser: Parser, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        parser.parse(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert "(default: 20)" in text and "(default: one per core)" in text
    assert "keep (default: off)" in text
    assert "[]" not in text and "None" not in text


def test_all_wrong_values_are_reported_at_once() -> None:
    parser = options.Parser(None)
    parser.add_argument("--nodes", type=options.positive_int, default=1)
    parser.add_argument("--kind", choices=("a", "b"))
    parser.add_argument("--port", type=options.port)
    with pytest.raises(UsageError) as caught:
        parser.parse(["--nodes", "", "--kind", "c", "--port", "0"])
    problem = caught.value.problem
    assert problem.startswith("3 problems:") and "got nothing" in problem
    assert "invalid choice: 'c'" in problem
    assert "1 to 65535" in problem and len(caught.value.several) == 3
    problems = Problems()
    problems.add(caught.value)
    problems.add("one more")
    with pytest.raises(UsageError, match="4 problems"):
        problems.raise_if_any()


def test_names_that_are_not_utf8_are_refused_except_for_raw_files(tmp_path: Path) -> None:
    parser = Parser("a stage")
    for flag in ("--src-dir", "--save-dir"):
        parser.add_argument(flag, type=Path, help="directory")
    parser.add_argument("-d", "--dataset-name", action="append", help="dataset")
    assert parser.parse(["--src-dir", "n\udcfc"]).src_dir == Path("n\udcfc")
    with pytest.raises(UsageError) as caught:
        parser.parse(["--save-dir", "n\udcfc", "-d", "ü", "-d", "\udcfc=2"])
    text = caught.value.render()
    assert "--save-dir: n\udcfc is not" in text
    assert "the current directory" not in text
    assert "-d/--dataset-name: \udcfc=2" in text and "ü" not in text


def test_a_spike_factor_that_would_skip_every_step_is_refused() -> None:
    for text in ("0", "1.01", "30"):
        assert options.factor(text) == float(text)
    for text in ("0.5", "1", "-1", "inf", "nan"):
        with pytest.raises(argparse.ArgumentTypeError, match="number above 1"):
            options.factor(text)


def test_a_current_directory_that_is_not_utf8_is_refused(
    parser: Parser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory := tmp_path / "n\udcfc").mkdir()
    monkeypatch.chdir(directory)
    with pytest.raises(UsageError, match=r"current directory .*UTF-8"):
        parser.parse([])


def test_a_current_directory_that_was_deleted_is_refused(
    parser: Parser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory := tmp_path / "gone").mkdir()
    monkeypatch.chdir(directory)
    directory.rmdir()
    with pytest.raises(UsageError, match="was deleted"):
        parser.parse([])
