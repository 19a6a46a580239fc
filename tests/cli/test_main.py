"""The command line as one: help without torch, errors, ends, the example of every command, and completion."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from autopar.cli import command
from autopar.cli.command import COMMANDS
from autopar.cli.main import main, parser
from tests.test_house import ROOT

QUICK = ("estimate", "completion")


def example_of(name: str) -> str:
    """The last line of a command's help."""
    (subparsers,) = (action for action in parser([name])._actions if isinstance(action, argparse._SubParsersAction))
    text = subparsers.choices[name].format_help()
    return text.rstrip().rpartition("example:\n  ")[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A folder with the examples in it, and, where a slow test asks for them, what they save."""
    here = tmp_path_factory.mktemp("examples")
    (here / "examples").symlink_to(ROOT / "examples")
    if not any(one.get_closest_marker("slow") for one in request.session.items if one.path == request.path):
        return here
    before = os.getcwd()
    os.chdir(here)
    try:
        exec(
            compile((ROOT / "examples/command_line.py").read_text(), "command_line.py", "exec"),
            {"__name__": "__main__"},
        )
    finally:
        os.chdir(before)
    return here


def test_help_names_every_command_and_imports_neither_torch_nor_rich() -> None:
    code = (
        "import sys\nfrom autopar.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    print(sorted({'torch', 'rich', 'numpy'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.rstrip().endswith("[]")
    for name, about in COMMANDS.items():
        assert re.search(rf"^ +{name}\b", run.stdout, re.MULTILINE)
        assert about in re.sub(r"\s+", " ", run.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example_of_the_command(name: str) -> None:
    assert example_of(name).startswith(f"autopar {name} ")


def printed(name: str) -> str:
    """The example of a command as the page has it: its command line, and the output under it."""
    page = (ROOT / "docs/command_line.md").read_text().split(f"\n## autopar {name}\n")[1].split("\n## ")[0]
    return page.split("```\n")[1].split("```")[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_has_the_example(name: str) -> None:
    assert printed(name).splitlines()[0] == f"$ {example_of(name)}"


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
)
def test_the_example_of_a_command_prints_what_the_page_says(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "completion" and importlib.util.find_spec("shtab") is None:
        pytest.skip("needs shtab")
    monkeypatch.chdir(folder)
    words = shlex.split(example_of(name))
    words = words[: words.index(">")] if ">" in words else words
    assert main(words[1:]) == 0
    said = capsys.readouterr().out
    assert said.strip()
    for line in filter(None, printed(name).splitlines()[1:]):
        start, left_out, _ = line.partition("…")
        assert any(own.startswith(start) if left_out else own == line for own in said.splitlines()), line


def schema(name: str) -> jsonschema.Draft202012Validator:
    """The schema of a command's JSON."""
    own = json.loads((ROOT / f"docs/schemas/{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(own)
    return jsonschema.Draft202012Validator(own)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("estimate", []),
        ("estimate", ["--search", "--nodes", "1"]),
        *(
            pytest.param(name, [], marks=pytest.mark.slow)
            for name in COMMANDS
            if name not in ("estimate", "doctor", *QUICK)
        ),
    ],
)
def test_json_is_as_its_schema_says(
    name: str, more: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    words = shlex.split(example_of(name))
    words = ["hf_json" if word == "hf" else word for word in words]
    assert main([*words[1:], *more, "--json"]) == 0
    schema(name).validate(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize(("words", "said"), [([], "required: COMMAND"), (["fly"], "invalid choice: 'fly'")])
def test_wrong_words_end_with_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_unknown_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["estimate", "--batch", "8", "--colour"], ["--colour", "estimate", "--batch", "8"]):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == 2
        assert "autopar estimate: error: unrecognized arguments: --colour" in capsys.readouterr().err


def ran(run: object, *words: str) -> int:
    """The exit status of a command that is this function. Its words behind `--` are as `autopar tune` takes them."""
    whole = argparse.ArgumentParser(prog="autopar")
    own = command.add(whole.add_subparsers(), "tune", run, "", "")
    own.add_argument("directory", nargs="?")
    return command.start(whole, ["tune", *words])


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (command.AutoparError("no such plan"), 2, "autopar tune: no such plan\n"),
        (FileNotFoundError(2, "No such file or directory", "there/plan.json"), 2, "there/plan.json: No such file"),
        (OSError(28, "No space left on device"), 2, "autopar tune: No space left on device\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_end_with_a_line_and_interrupts_quietly(
    error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise error

    assert ran(fail) == status
    written = capsys.readouterr()
    assert said in written.err
    assert bool(written.err) == bool(said)
    assert not written.out


def test_an_error_of_ours_keeps_its_traceback() -> None:
    def fail(_: argparse.Namespace) -> int:
        raise AssertionError("a bug")

    with pytest.raises(AssertionError, match="a bug"):
        ran(fail)


def test_words_behind_dashes_are_for_another_program() -> None:
    seen: list[list[str]] = []

    def look(args: argparse.Namespace) -> int:
        seen.append([args.directory, *args.more])
        return 0

    assert ran(look, "out", "--", "--nnodes", "2") == 0
    assert seen == [["out", "--nnodes", "2"]]


SLOW_READER = "import sys\nfrom autopar.cli import command, terminal\n{}\nsys.exit(main())"
TALKS = """
import argparse
def run(args):
    for n in range(100000):
        terminal.show(f"line {n}")
    return 0
def main():
    return command.alone("dump", lambda commands: command.add(commands, "dump", run, "", ""), [])
"""


def test_a_reader_that_has_gone_ends_a_command_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_READER.format(TALKS)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "line 0\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 0
    process.stderr.close()


needs_shtab = pytest.mark.skipif(importlib.util.find_spec("shtab") is None, reason="needs shtab")


def test_completion_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'autopar[completion]'" in capsys.readouterr().err


@needs_shtab
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in (*COMMANDS, "--section"))


@needs_shtab
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["autopar", "du"], ["dump"]),
        (["autopar", "dump", "--sec"], ["--section"]),
        (["autopar", "dump", "--section", "coll"], ["collectives"]),
        (["autopar", "tune", "ou"], ["out"]),
    ],
)
def test_bash_completes(
    words: list[str], completed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "out").mkdir()
    (tmp_path / "autopar.bash").write_text(capsys.readouterr().out)
    subprocess.run(["bash", "-n", "autopar.bash"], cwd=tmp_path, check=True)
    asked = f"""
source autopar.bash
spec=$(complete -p autopar)
[[ $spec =~ -F\\ ([^ ]+) ]]
COMP_WORDS=({shlex.join(words)})
COMP_CWORD={len(words) - 1}
"${{BASH_REMATCH[1]}}" autopar {shlex.quote(words[-1])} {shlex.quote(words[-2])}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    run = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.stdout.split() == completed, run.stderr
