# covers: README.md, CONTRIBUTING.md, docs/*/*.md, tests/form.py
"""The rules of the house: rooms, sizes, options, documentation, requirements."""

from __future__ import annotations

import argparse
import ast
import functools
import graphlib
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lib.core import options
from tests import form, house
from tests.reference import TOOLS, parser_of
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parent.parent
STAGES = sorted(ROOT.glob("0[1-5]_*.py"))
LIB = sorted((ROOT / "lib").rglob("*.py"))
CODE = [*LIB, *STAGES, *sorted((ROOT / "launch").rglob("*.py"))]
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ROOMS = {
    "core": set(),
    "runs": {"core"},
    "pages": {"core"},
    "corpus": {"core"},
    "tokens": {"core"},
    "curate": {"core", "pages", "tokens", "corpus"},
    "models": {"core"},
    "hub": {"core", "models"},
    "parallel": {"core", "tokens", "models"},
    "optim": {"core", "models"},
    "planning": {"core", "tokens", "models", "parallel", "optim"},
    "checkpoints": {"core", "runs", "models", "hub", "parallel"},
    "export": {"core", "runs", "tokens", "models", "parallel", "checkpoints"},
    "report": {"core", "runs", "pages"},
    "evaluate": {"core", "runs", "tokens", "models", "hub", "parallel", "checkpoints", "export"},
    "generate": {"core", "tokens", "models", "parallel", "evaluate"},
    "train": {
        "core",
        "runs",
        "tokens",
        "models",
        "hub",
        "parallel",
        "optim",
        "planning",
        "checkpoints",
        "export",
        "evaluate",
    },
}
# Below launch/, where a package stands behind each script, or behind several.
PACKAGES = {
    "bundles": set(),
    "checks": {"bundles", "supervision"},
    "cloud": {"checks", "supervision"},
    "runs": set(),
    "supervision": set(),
}
PACKAGES_OF_CLOUD = {"checkpoints": set(), "kube": set(), "images": {"kube"}}
# Only these import what serves a cloud, since users type their names.
FRONT_DOORS = {"launch/build_image.py", "launch/kubernetes.py"}
HEAVY = {"torch", "transformers", "datasets", "huggingface_hub", "numpy", "pyarrow", "tokenizers"}
NETWORK = {"huggingface_hub", "requests", "urllib", "urllib3", "socket", "http", "httpx", "ftplib"}
CLOUD = {"fsspec", "s3fs"}
# Programs that look at runs, and the rooms that they reach, lazily or through others.
READERS = {
    "launch/monitor.py": {"runs", "core"},
    "launch/stop.py": {"runs", "core"},
    "launch/supervision/head.py": {"runs", "core"},  # supervise.py itself reads stage 04's options
    "lib/report/__main__.py": {"report", "pages", "runs", "core"},
    "lib/checkpoints/__main__.py": {"checkpoints", "runs", "core"},
}
# What a checkpoint contains is named with the model's help; the commands never call that.
ALSO_REACHED = {"lib/checkpoints/__main__.py": {"lib/models/sharded.py"}}
SCRIPTS = {".py", ".sh", ".sbatch"}
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "launch" / "skills").rglob("*.md")),
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def check_each(paths: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Return a decorator that makes one test of a rule for files, which lists all that break it.

    A test per file and rule would cost more than the rules themselves.
    """

    def decorate(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as error:
                    broken.append(f"{name_of(path)}: {error}")
            assert not broken, "\n".join(broken)

        test.__name__ = rule.__name__
        test.__doc__ = rule.__doc__
        return test

    return decorate


@functools.cache
def imports(path: Path) -> list[str]:
    """Return the full dotted name of every import, those inside functions too."""
    names: list[str] = []
    for node in ast.walk(form.parse_file(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def tracked() -> list[Path]:
    """Return the files of the repository, including those that are not committed yet."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a checkout, to tell the repository's files from others")
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@check_each(LIB)
def test_imports_go_down_the_rooms_only(path: Path) -> None:
    room = path.relative_to(ROOT / "lib").parts[0]
    allowed = {room, *ROOMS[room]} if room in ROOMS else set()
    used = {name.split(".")[1] for name in imports(path) if name.split(".")[0] == "lib"}
    assert used <= allowed, f"lib/{room} must not import {used - allowed}"
    others = {name.split(".")[0] for name in imports(path)}
    assert not others & {"launch", "tests", "benchmarks"}
    assert room != "core" or not others & HEAVY


@pytest.mark.parametrize("room", ["corpus", "curate"])
def test_no_folder_of_a_room_imports_upwards(room: str) -> None:
    """Each folder counts as one module: what it imports of the room must not import it."""
    base = ROOT / "lib" / room
    graph: dict[str, set[str]] = {}
    for path in base.rglob("*.py"):
        name = path.relative_to(base).with_suffix("").parts[0]
        inside = [name for name in imports(path) if name.startswith(f"lib.{room}.")]
        graph.setdefault(name, set()).update(used.split(".")[2] for used in inside)
        graph[name].discard(name)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


@check_each([ROOT / name for name in READERS])
def test_programs_that_look_at_runs_reach_few_rooms(path: Path) -> None:
    name = name_of(path)
    reached = {name_of(module) for module in house.find_reached(ROOT, path)}
    in_lib = {tuple(Path(module).parts[:2]) for module in reached - ALSO_REACHED.get(name, set())}
    assert {parts[1] for parts in in_lib if parts[0] == "lib"} <= READERS[name]


@check_each(sorted((ROOT / "launch").rglob("*/*.py")))
def test_packages_of_launch_import_downwards_only(path: Path) -> None:
    package = path.relative_to(ROOT / "launch").parts[0]
    used = {name.split(".")[1] for name in imports(path) if name.split(".")[0] == "launch"}
    assert used <= {package, *PACKAGES[package]}
    inner = path.parent.name
    if inner in PACKAGES_OF_CLOUD:
        used = {name.split(".")[2] for name in imports(path) if name.startswith("launch.cloud.")}
        assert used <= {inner, *PACKAGES_OF_CLOUD[inner]}


@check_each([*CODE, *BENCHMARKS])
def test_only_front_doors_import_what_serves_a_cloud(path: Path) -> None:
    is_inside = name_of(path).startswith("launch/cloud/")
    used = {name for name in imports(path) if name.split(".")[:2] == ["launch", "cloud"]}
    assert is_inside or name_of(path) in FRONT_DOORS or not used


def test_a_class_has_a_name_of_its_own() -> None:
    named = Counter(
        node.name
        for path in CODE
        for node in ast.walk(form.parse_file(path))
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, times in named.items() if times > 1]


def test_no_module_imports_itself_through_others() -> None:
    """Lazy imports count too: they only hide what two modules should not know of each other."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in CODE}
    graph = {
        name: {
            used
            for full in imports(path)
            for used in (full, full.rpartition(".")[0])
            if used in modules and used != name
        }
        for name, path in modules.items()
    }
    remaining = set(graph)
    while free := {name for name in remaining if not graph[name] & remaining}:
        remaining -= free
    assert not remaining, f"among these are circles: {sorted(remaining)}"


@check_each(CODE)
def test_only_the_hub_opens_connections(path: Path) -> None:
    names = {name for name in imports(path) if name.split(".")[0] in NETWORK | CLOUD}
    assert (
        not names
        or name_of(path) == "lib/hub/client.py"
        or (name_of(path) == "lib/hub/folder.py" and {n.split(".")[0] for n in names} <= CLOUD)
        or (name_of(path), names) == ("launch/torchrun.py", {"socket"})
    )  # which listens on loopback


def test_rooms_are_those_of_the_design_and_none_is_a_lumber_room() -> None:
    rooms = {path.name for path in (ROOT / "lib").iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(ROOMS)
    assert not [path for path in tracked() if path.name in ("utils.py", "helpers.py", "misc.py")]


@check_each([*CODE, *BENCHMARKS])
def test_modules_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 450
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(form.parse_text(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno - node.lineno >= 75
        and node.name != "parse"  # which declares the options
    ]
    assert not long


def test_no_code_breaks_a_rule_of_form() -> None:
    assert not [
        f"{name_of(path)}:{line}: {rule}"
        for path in [*CODE, *BENCHMARKS, *TESTS]
        for rule, line in form.violations(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(
    ("rule", "broken", "allowed"),
    [
        ("assignments of unrelated values", "a, b = 1, 2", "a, b = b, a"),
        ("assignments of unrelated values", "a = b = 0", "a, b = pair = (1, 2)"),
        ("assignments of unrelated values", "a, b = f(a), f(b)", "x.a, x.b = 1, x.a + x.b"),
        ("assignments of unrelated values", "a[0], b = 1, 2", "a, *b = 1, *c"),
        ("nested conditional expressions", "a if b else c if d else e", "a if b else f(c)"),
        ("nested conditional expressions", "(a if b else c) if d else e", "f(a if b else c)"),
        ("literals with an index", "('off', 'on')[value]", "pairs[value]"),
        ("literals with an index", "'AB'[part == 'A']", "[*first, *then][0]"),
        ("literals with an index", "x[: 3 if y else 1]", "x[: min(3, y)]"),
        ("backslashes", "a = 1 + \\\n  2", 'a = """1\\\n2"""'),
    ],
)
def test_the_rules_of_form_find_what_they_forbid(rule: str, broken: str, allowed: str) -> None:
    assert [*form.violations(broken)] == [(rule, 1)]
    assert not [*form.violations(allowed)]


@pytest.mark.parametrize("stage", STAGES, ids=name_of)
def test_help_imports_nothing_heavy(stage: Path) -> None:
    """The help is promised in about a second, which only imports can exceed."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", str(stage), "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "lib.core.options" in imported
    assert not {name.split(".")[0] for name in imported} & (HEAVY | {"yaml"})
    assert "usage:" in done.stdout and "--dry-run" in done.stdout


@pytest.mark.parametrize("stage", STAGES, ids=name_of)
def test_options_have_help_and_the_common_ones_are_there(stage: Path) -> None:
    actions = parser_of(stage)._actions
    assert not [a.option_strings for a in actions if not (a.help or "").strip()]
    spelled = {string for action in actions for string in action.option_strings}
    assert {"--config", "--dry-run", "--overwrite", "--no-progress"} <= spelled
    assert ("--num-workers" in spelled) == (stage != STAGES[4])  # where it would do nothing
    assert all(re.fullmatch(r"-[a-z]|--[a-z][a-z0-9-]*", string) for string in spelled)
    valued = [a for a in actions if a.nargs != 0 and not a.choices]
    assert not [a.dest for a in valued if not a.metavar], "options that take no named value"


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return (script, arguments) of every command line that runs a stage or a tool of lib.

    Lines that elide something are left out.
    """
    command_lines = []
    for line in text.replace("\\\n", " \x01 ").splitlines():
        line = re.sub(r"\s*\x01\s*", " ", line)  # one command on several lines
        for column in re.split(r"\s{3,}", line.strip()):
            match = re.search(
                r"(?:python|torchrun|\$\(PY\)).*?\b(0\d_\w+\.py|-m lib\.\w+)(.*)", column
            )
            if match and "…" not in match[2]:
                arguments = re.split(r"\s#|`", match[2])[0]
                script = re.sub(r"-m lib\.(\w+)", r"lib/\1/__main__.py", match[1])
                command_lines.append((script, shlex.split(arguments)))
    return command_lines


WITH_COMMANDS = [*DOCUMENTS, ROOT / "Makefile", *STAGES]


@check_each(WITH_COMMANDS)
def test_every_command_that_is_shown_can_be_typed(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path in STAGES:
        text = ast.get_docstring(ast.parse(text))
    shown = commands(text)
    assert shown or path not in (ROOT / "README.md", ROOT / "Makefile", *STAGES)
    for script, arguments in shown:
        assert (ROOT / script).is_file(), f"no script {script}"
        if script in map(name_of, TOOLS):
            parser_of(ROOT / script).parse(arguments)
        else:
            load_script(ROOT / script).parse(arguments)


def spans(text: str) -> list[str]:
    """Return what stands in code blocks and between backticks."""
    blocks = re.findall(r"```.*?\n(.*?)```", text, re.DOTALL)
    return blocks + re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@check_each(DOCUMENTS)
def test_every_option_that_is_named_exists(path: Path) -> None:
    known = {
        string for stage in [*STAGES, *TOOLS] for string in parser_of(stage)._option_string_actions
    }
    known |= {
        "--nproc-per-node",
        "--nnodes",
        "--standalone",
        "--no-index",
        "--find-links",
        "--signals-to-handle",
        "--shutdown-timeout",  # torchrun, pip; docker, Slurm, nsys:
        "--gpus",
        "--gres",
        "--trace",
        "--output",
        "--wait",
        "--wrap",
        "--me",
        "--capture-range",
        "--capture-range-end",  # vLLM, CTranslate2, lm-eval:
        "--enable-lora",
        "--model",
        "--model-args",
        "--output-dir",
        "--tasks",
        "--include-path",
    }
    launchers = [path for path in (ROOT / "launch").rglob("*") if path.suffix in SCRIPTS]
    launchers.append(ROOT / "tests/house.py")
    for text in (path.read_text(encoding="utf-8") for path in launchers):
        known |= {*re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
        known |= {
            f"--{name.replace('_', '-')}"
            for name in [
                *re.findall(r"^    (\w+): .* = option\(", text, re.MULTILINE),
                *re.findall(r'"(\w+)"', " ".join(re.findall(r"aliases=\(([^)]*)\)", text))),
            ]
        }
    of_aws = r"(?m)(?:^|(?<=\$\())aws (?:.*\\\n)*.*"
    named = {
        option.replace("_", "-")
        for span in spans(path.read_text(encoding="utf-8"))
        for span in [re.sub(of_aws, "", span)]
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9_.-]*\w", span)
    }
    assert not named - known


# Of the systems that docs/how-to/coming-from.md compares with this project.
SCRIPTS_ELSEWHERE = {
    *("ORGANIZE_DATA.py", "DATA-HF.py", "MODEL_DOWNLOAD.py", "fsdp1.py", "tests/test_smoke.py"),
    *("validate_test_setup.py", "test_hyperpod_cluster.py", "download_c4.py"),
}


@check_each(DOCUMENTS)
def test_every_path_that_is_named_exists(path: Path) -> None:
    is_ours = re.compile(
        r"(?:lib|docs|tests|launch|benchmarks|\.ci)(?:/[\w./-]*)?"
        r"|[\w-]+\.(?:py|md|toml|txt)|Makefile"
    )
    named = {
        word.rstrip("/.,:")
        for span in spans(path.read_text(encoding="utf-8"))
        for word in re.split(r"[\s,;()]+", span)
        if is_ours.fullmatch(word)
    } - SCRIPTS_ELSEWHERE
    assert not [
        name for name in named if not (ROOT / name).exists() and not name.endswith(".txt")
    ]  # a text file may be one of a model


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@check_each(DOCUMENTS)
def test_every_link_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", path.read_text(encoding="utf-8"))
    for file, anchor in links:
        if "://" in file:
            continue
        page = path.parent / file if file else path
        assert page.exists(), file
        assert not anchor or anchor in anchors(page), f"{file}#{anchor}"


def test_every_test_that_the_table_of_faults_names_exists() -> None:
    named = re.findall(
        r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs/explanation/faults.md").read_text("utf-8")
    )
    assert len(named) > 80
    assert not [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / "tests" / file).is_file()
        or f"def {test}(" not in (ROOT / "tests" / file).read_text("utf-8")
    ]


def requirements(name: str) -> list[str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize(
    "name", ["requirements.txt", "requirements-dev.txt", "requirements-optional.txt"]
)
def test_requirements_are_exact(name: str) -> None:
    pin = re.compile(r'[a-z0-9-]+(\[[a-z0-9]+\])?==\d[\w.]*(; python_version (>=|<) "3\.\d+")?')
    assert not [line for line in requirements(name) if not pin.fullmatch(line)]


def test_what_is_imported_is_required() -> None:
    named = {line.partition("==")[0] for line in requirements("requirements.txt")}
    third_party = {name.split(".")[0] for path in CODE for name in imports(path)}
    # Python 3.14 has compression of its own.
    third_party -= {*sys.stdlib_module_names, "compression", "lib", "launch"}
    names = {"yaml": "pyyaml", "fasttext": "fasttext-predict", "functorch": "torch"}
    names |= {"backports": "backports-zstd", "phonenumbers": "phonenumberslite"}
    packages = {names.get(name, name.replace("_", "-")) for name in third_party}
    # An option wants each of these, and says how to install it.
    pins = requirements("requirements-optional.txt")
    optional = {re.split(r"[\[=]", pin)[0] for pin in pins}
    optional -= {"flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels"}  # lib/parallel/flash_4.py
    optional -= {"s3fs"}  # fsspec imports it
    assert optional <= packages
    assert not packages - named - optional
    assert not named - packages - {"tensorboard"}  # which torch.utils.tensorboard imports


def test_nothing_of_the_place_it_was_written_at_is_in_a_file() -> None:
    """Written in two halves, so that this file does not mention them either."""
    places = [
        "py" + "pi.org",
        "python" + "hosted.org",
        "conda.ana" + "conda",
        "registry." + "npmjs",
        "/wo" + "rk/",
        "/tmp" + "/w/",
        "index" + "-url",
        "arti" + "factory",
    ]
    mentions = [
        f"{name_of(path)}: {place}"
        for path in tracked()
        for place in places
        if place.encode() in path.read_bytes()
    ]
    assert not mentions


def test_parser_is_the_only_way_to_read_options() -> None:
    """A plain ArgumentParser would know neither YAML nor both spellings."""
    assert issubclass(options.Parser, argparse.ArgumentParser)
    assert not [name_of(stage) for stage in STAGES if "ArgumentParser(" in stage.read_text()]
