"""Kills of all stages at random moments and file operations: python -m tests.random_kills --help.

A command is killed, checked and typed again until it ends by itself; then what it leaves must be
what it leaves undisturbed, byte for byte, and in stage 04 the losses and checkpoints bit for bit.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle
from pathlib import Path

from tests import faults, training
from tests.fault_points import Fault
from tests.faults import Server, Undisturbed, begun_at, events, run_options, valid_steps
from tests.hub_models import make_files
from tests.kills import Commands, Scene, kill

LONG = 40  # steps
STAGES = (1, 2, 3, 4, 5)


class Life:
    """A run that is killed over and over until it is complete.

    After each kill: every checkpoint is what it should be and the newest step never goes back;
    the next launch goes on from exactly that one.
    """

    def __init__(self, outputs: Path, options: tuple[object, ...], expected: Undisturbed) -> None:
        self.outputs = outputs
        self.options = options
        self.expected = expected
        self.newest = 0

    def launches(self) -> int:
        """Return how often the run has begun or gone on."""
        return len([e for e in events(self.outputs) if e["event"] in ("start", "resume")])

    def check(self, launches_before: int) -> None:
        """Check what a killed launch has left."""
        if self.launches() > launches_before:
            assert begun_at(self.outputs) == self.newest
        found = max(valid_steps(self.outputs), default=0)
        assert found >= self.newest
        self.newest = found
        self.expected.require_sound(self.outputs)

    def until_begun(self, launches_before: int, ended: Callable[[], bool]) -> None:
        """Wait until a launch has begun to train, or has ended."""
        while self.launches() == launches_before and not ended():
            time.sleep(0.002)


def lives(
    expected: Undisturbed, parent: Path, rng: random.Random, finish: Callable[[Life], None]
) -> Iterator[Life]:
    """Yield runs to kill a launch of: the same one until it is complete, then another.

    After the last kill, and wherever one is complete, it must have learned what it should.
    """
    for number in count():
        outputs = parent / f"life_{number}" / "outputs"
        life = Life(
            outputs,
            run_options(
                outputs,
                "--ckpt-freq",
                rng.choice([1, 2]),
                "--ckpt-async",
                rng.choice(["on", "off"]),
                "--ckpt-keep",
                2,
                steps=LONG,
            ),
            expected,
        )
        try:
            while life.newest < LONG:
                yield life
        finally:
            finish(life)
            expected.require_same(outputs)
            require_no_leftovers(outputs)


def require_no_leftovers(outputs: Path) -> None:
    """Assert that nothing but what a run leaves lies in its directory."""
    files = {path.relative_to(outputs).as_posix() for path in outputs.rglob("*")}
    odd = [name for name in files if "tmp" in name or "trash" in name or ".unfinished" in name]
    assert not odd and {path.name for path in outputs.iterdir() if path.is_dir()} == {"run"}, odd


def kill_often(
    server: Server, expected: Undisturbed, parent: Path, kills: int, seed: int = 0
) -> int:
    """Kill launches at random moments, most of them after the start, until there were so many.

    Returns how many there were.
    """
    rng = random.Random(seed)
    done = 0
    runs = lives(expected, parent, rng, lambda life: server.run(*life.options))
    while done < kills:
        life = next(runs)
        before = life.launches()
        launch = server.start(*life.options)
        if rng.random() < 0.75:
            life.until_begun(before, launch.poll)
            time.sleep(rng.uniform(0, 0.25))
        else:
            time.sleep(rng.uniform(0, 0.6))
        launch.kill()
        [code] = launch.wait()
        assert code in (0, -signal.SIGKILL), launch.output[-3000:]
        done += bool(code)
        life.check(before)
    runs.close()
    return done


def scenes_of(commands: Commands, stage: int, parent: Path) -> Iterator[Scene]:
    """Yield the commands of a stage in turn, without end, each made when it is first needed."""
    made = []
    for command in commands.of_stage(stage):
        made.append(Scene(command, parent / command.name))
        yield made[-1]
    yield from cycle(made)


def kill_commands(commands: Commands, stage: int, parent: Path, kills: int, seed: int) -> int:
    """Kill the commands of a stage in turn until there were so many kills; return how many.

    Every other one is killed from outside after a random time, and so also where Rust or C++ code
    writes; the others at a random file operation, some in the middle of a write.
    """
    rng = random.Random(seed)
    done = 0
    scenes = scenes_of(commands, stage, parent)
    while done < kills:
        scene = next(scenes)
        project = scene.copy()
        killed = True
        while killed and done < kills:
            fault = (
                Fault(str(project), rng.randint(1, scene.operations), rng.choice(["kill", "torn"]))
                if rng.random() < 0.5
                else None
            )
            launch = scene.command.start(project, fault)
            if fault is None:
                launch.poll(rng.uniform(0, scene.seconds))
                kill(launch, with_workers=rng.random() < 0.5)
            killed = launch.wait() == [-signal.SIGKILL]
            assert killed or launch.codes == [0], f"{scene.command.name}: {launch.codes}"
            done += killed
            scene.require_nothing_lost(project)
        if killed:
            scene.command.run(project)
        scene.require_done(project)
    return done


class Killer:
    """Kills commands of all stages, in a directory of its own."""

    def __init__(self, prepared: Path, model_files: dict[str, bytes], folder: Path) -> None:
        """prepared: see training.prepare. folder: an empty directory."""
        self._folder = folder
        for name in ("commands", "server", "undisturbed"):
            (folder / name).mkdir()
        self._commands = Commands(prepared, model_files, folder / "commands")
        self._server = faults.make_server(prepared, folder / "server")
        outputs = folder / "undisturbed" / "outputs"
        self._run = faults.run_undisturbed(
            self._server, run_options(outputs, steps=LONG), outputs, LONG
        )

    def kill(self, stage: int, kills: int, seed: int) -> int:
        """Kill commands of a stage until there were so many kills, and return how many."""
        (parent := self._folder / f"stage_{stage}").mkdir()
        if stage == 4:
            return kill_often(self._server, self._run, parent, kills, seed)
        return kill_commands(self._commands, stage, parent, kills, seed)

    def close(self) -> None:
        """End all that is still at work."""
        self._commands.close()
        self._server.close()


def main() -> None:
    """Kill, and print how often."""
    parser = argparse.ArgumentParser(description="Kill the stages at random moments.")
    parser.add_argument("--kills", type=int, default=200, help="in all (default: 200)")
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(10**6),
        help="of the moments (default: another one each time, which is printed)",
    )
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        total = 0
        began = time.monotonic()
        for part in ("prepared", "model", "killed"):
            (folder / part).mkdir()
        killer = Killer(
            training.prepare(folder / "prepared"), make_files(folder / "model"), folder / "killed"
        )
        try:
            for number, stage in enumerate(STAGES):
                kills = (given.kills + number) // len(STAGES)
                total += (done := killer.kill(stage, kills, given.seed))
                shutil.rmtree(folder / "killed" / f"stage_{stage}")
                print(
                    f"stage {stage:02}: {done} kills, nothing lost "
                    f"({time.monotonic() - began:.0f} s so far)",
                    flush=True,
                )
        finally:
            killer.close()
    print(f"{total} kills over {len(STAGES)} stages, nothing lost")


if __name__ == "__main__":
    main()
