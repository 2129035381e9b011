"""Kill all stages at random moments and file operations: python -m tests.random_kills --help.

A command is killed, checked and started again until it ends by itself. Then its artifact must be
that of an undisturbed command, byte for byte, and for stage 04 also the losses and checkpoints.
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
from tests.faults import (
    Server,
    Undisturbed,
    find_start_step,
    find_valid_steps,
    read_events,
    run_options,
)
from tests.hub_models import make_model_files
from tests.kills import Commands, Scene, kill_launch

LONG_STEPS = 40  # steps
STAGES = (1, 2, 3, 4, 5)


class Life:
    """A run that is killed again and again until it is complete.

    After each kill all checkpoints that verify have the expected content, the newest step is not
    older than before, and the next launch continues from it.
    """

    def __init__(self, outputs: Path, options: tuple[object, ...], expected: Undisturbed) -> None:
        self.outputs = outputs
        self.options = options
        self.expected = expected
        self.newest = 0

    def launches(self) -> int:
        """Return how often the run has started or resumed."""
        return len(
            [event for event in read_events(self.outputs) if event["event"] in ("start", "resume")]
        )

    def check(self, launches_before: int) -> None:
        """Check the files of a run after a kill."""
        if self.launches() > launches_before:
            assert find_start_step(self.outputs) == self.newest
        newest = max(find_valid_steps(self.outputs), default=0)
        assert newest >= self.newest
        self.newest = newest
        self.expected.require_sound(self.outputs)

    def until_begun(self, launches_before: int, ended: Callable[[], bool]) -> None:
        """Wait until a launch trains or has ended."""
        while self.launches() == launches_before and not ended():
            time.sleep(0.002)


def make_lives(
    expected: Undisturbed, parent: Path, rng: random.Random, finish: Callable[[Life], None]
) -> Iterator[Life]:
    """Yield runs to kill: the same one until it is complete, then a new one.

    Each run is finished at the end, and must then equal the undisturbed one.
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
                steps=LONG_STEPS,
            ),
            expected,
        )
        try:
            while life.newest < LONG_STEPS:
                yield life
        finally:
            finish(life)
            expected.require_same(outputs)
            require_no_leftovers(outputs)


def require_no_leftovers(outputs: Path) -> None:
    """Assert that the directory of a run contains no temporary files."""
    files = {path.relative_to(outputs).as_posix() for path in outputs.rglob("*")}
    leftovers = [
        name for name in files if "tmp" in name or "trash" in name or ".unfinished" in name
    ]
    assert not leftovers and {path.name for path in outputs.iterdir() if path.is_dir()} == {
        "run"
    }, leftovers


def kill_often(
    server: Server, expected: Undisturbed, parent: Path, kills: int, seed: int = 0
) -> int:
    """Kill launches at random moments, most of them after the start, until `kills` is reached.

    Returns the number of kills.
    """
    rng = random.Random(seed)
    done = 0
    runs = make_lives(expected, parent, rng, lambda life: server.run(*life.options))
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


def make_scenes(commands: Commands, stage: int, parent: Path) -> Iterator[Scene]:
    """Yield the scenes of a stage in turn, without end; each is made when it is first needed."""
    scenes = []
    for command in commands.of_stage(stage):
        scenes.append(Scene(command, parent / command.name))
        yield scenes[-1]
    yield from cycle(scenes)


def kill_commands(commands: Commands, stage: int, parent: Path, kills: int, seed: int) -> int:
    """Kill the commands of a stage in turn until `kills` is reached; return the number of kills.

    Half of them are killed from outside after a random time, so also while Rust or C++ code writes.
    The others are killed at a random file operation, some in the middle of a write.
    """
    rng = random.Random(seed)
    done = 0
    scenes = make_scenes(commands, stage, parent)
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
                kill_launch(launch, with_workers=rng.random() < 0.5)
            killed = launch.wait() == [-signal.SIGKILL]
            assert killed or launch.codes == [0], f"{scene.command.name}: {launch.codes}"
            done += killed
            scene.require_nothing_lost(project)
        if killed:
            scene.command.run(project)
        scene.require_done(project)
    return done


class Killer:
    """Kills commands of all stages in a directory."""

    def __init__(self, prepared: Path, model_files: dict[str, bytes], folder: Path) -> None:
        """prepared: of `training.prepare_project`. folder: an empty directory."""
        self._folder = folder
        for name in ("commands", "server", "undisturbed"):
            (folder / name).mkdir()
        self._commands = Commands(prepared, model_files, folder / "commands")
        self._server = faults.make_server(prepared, folder / "server")
        outputs = folder / "undisturbed" / "outputs"
        self._run = faults.run_undisturbed(
            self._server, run_options(outputs, steps=LONG_STEPS), outputs, LONG_STEPS
        )

    def kill(self, stage: int, kills: int, seed: int) -> int:
        """Kill commands of a stage until `kills` is reached, and return the number of kills."""
        (parent := self._folder / f"stage_{stage}").mkdir()
        if stage == 4:
            return kill_often(self._server, self._run, parent, kills, seed)
        return kill_commands(self._commands, stage, parent, kills, seed)

    def close(self) -> None:
        """End all servers and launches."""
        self._commands.close()
        self._server.close()


def main() -> None:
    """Kill commands of all stages, and print the number of kills."""
    parser = argparse.ArgumentParser(description="Kill the stages at random moments.")
    parser.add_argument(
        "--kills", type=int, default=200, help="number of kills in all stages (default: 200)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(10**6),
        help="seed of the random moments (default: a random one, which is printed)",
    )
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        total = 0
        began = time.monotonic()
        for part in ("prepared", "model", "killed"):
            (folder / part).mkdir()
        killer = Killer(
            training.prepare_project(folder / "prepared"),
            make_model_files(folder / "model"),
            folder / "killed",
        )
        try:
            for number, stage in enumerate(STAGES):
                kills = (args.kills + number) // len(STAGES)
                total += (done := killer.kill(stage, kills, args.seed))
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
