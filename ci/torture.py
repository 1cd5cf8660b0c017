#!/usr/bin/env python3
"""Makes the commands fail in every way that a machine can, and insists on a sentence.

    ci/torture.py [--bin target/release] [--long] [NAME...]

Exports the bundled model and lets faults happen: closed streams, odd paths, full disks, little
memory, signals at random moments, weights that shrink while they are mapped, hostile text. Every
case ends with a line; the exit code is 0 if all held. `--long` runs the long ones at full length.
"""

import argparse
import errno
import json
import os
import random
import resource
import shutil
import signal
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUNDLE = ROOT / "ci/models/tiny-chat-int4"
SMALLEST = ROOT / "ci/fixtures/tiny-31b"
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris.\n"
CASES = []


def case(function):
    CASES.append(function)
    return function


class Torture:
    def __init__(self, binaries: Path, work: Path, long: bool):
        self.binaries, self.work, self.long = binaries, work, long
        self.random = random.Random(1)
        self.out = work / "out"
        done = self.export(self.out)
        assert done.returncode == 0, done.stderr

    def command(self, name, *arguments):
        return [str(self.binaries / name), *map(str, arguments)]

    def preload(self, source):
        """A library for LD_PRELOAD of a file of ci/faults; none without a C compiler."""
        library = self.work / f"{source}.so"
        if library.exists() or not shutil.which("cc"):
            return library if library.exists() else None
        subprocess.run(["cc", "-O1", "-Wall", "-fPIC", "-shared", "-o", library,
                        ROOT / f"ci/faults/{source}.c", "-ldl"], check=True)
        return library

    def call(self, name, *arguments, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
                   "stdin": subprocess.DEVNULL, "timeout": 300, **options}
        return subprocess.run(self.command(name, *arguments), **options)

    def export(self, out, **options):
        return self.call("gemma4-export", "--prequantized", BUNDLE, "--output-dir", out, **options)

    def files(self, out=None):
        out = out or self.out
        return ["--model_path", out / "model.pte", "--data_path", out / "model.ptd"]

    def ask(self, *arguments, out=None, **options):
        flags = ["--device", "cpu", "--temperature", "0", "-q", *arguments]
        if "--prompts" not in arguments and "--prompt_file" not in arguments:
            flags += ["--prompt", QUESTION]
        return self.call("gemma4-run", *self.files(out), *flags, **options)

    def fresh(self, name):
        path = self.work / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def same_as_first(self, out):
        for name in ("model.pte", "model.ptd"):
            assert (out / name).read_bytes() == (self.out / name).read_bytes(), f"{name} differs"

    def answers(self, out=None):
        done = self.ask(out=out)
        assert done.stdout.decode() == ANSWER, (done.stdout, done.stderr)


def failed(done, code, *words):
    """One sentence, the code, and no word of a panic."""
    said = done.stderr.decode(errors="replace")
    assert done.returncode == code, f"exit {done.returncode}, not {code}: {said}"
    assert "panicked" not in said and "error: " in said, said
    for word in words:
        assert word in said, f"{word!r} is not in: {said}"


def failed_words(done, names):
    """One sentence with one of these names."""
    failed(done, done.returncode)
    said = done.stderr.decode(errors="replace")
    assert done.returncode in (1, 3) and any(name in said for name in names), (names, said)


def leftovers(directory):
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


@case
def only_the_expected_program_runs(t):
    told = t.call("gemma4-inspect", t.out / "model.pte", "--json")
    right = json.loads(told.stdout)["id"]
    wrong = ("0" if right[0] != "0" else "1") + right[1:]
    text = t.work / "text"
    text.write_text("The capital of France is Paris.")
    commands = [("gemma4-run", "--prompt", QUESTION, "-q"), ("gemma4-bench", "-p", 8, "-n", 2, "-r", 1),
                ("gemma4-eval", "nll", "--text", text)]
    for name, *arguments in commands:
        verb = arguments[:1] if name == "gemma4-eval" else []
        rest = arguments[len(verb):] + t.files() + ["--device", "cpu"]
        call = lambda given: t.call(name, *verb, "--expect_program", given, *rest)
        done = call(right.upper())
        assert done.returncode == 0, done.stderr
        failed(call(wrong), 1, right, wrong)
        failed(call("12ab"), 2, "64 hexadecimal digits")
    return "3 commands, the right id and two wrong ones"


@case
def closed_streams(t):
    for descriptor in (0, 1, 2):
        done = t.ask(preexec_fn=lambda: os.close(descriptor))
        assert done.returncode in (0, 1), (descriptor, done)
        assert b"panicked" not in done.stderr, done.stderr
        if descriptor != 1:
            assert done.stdout.decode() == ANSWER, (descriptor, done)
    child = subprocess.Popen(t.command("gemma4-run", *t.files(), "--device", "cpu", "--prompt", QUESTION),
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    child.stdout.close()
    said = child.stderr.read()
    assert child.wait(60) == 0 and b"panicked" not in said, said
    with open("/dev/full", "w") as full:
        done = t.ask(stdout=full)
    failed(done, 1, "No space left")
    return "each stream closed, a reader gone, a full stdout"


@case
def odd_paths(t):
    names = ["with some spaces", "Zürich – 東京 🙂", "-dash", "x" * 200, "a'b\"c$d"]
    for name in names:
        out = t.fresh("paths") / name
        done = t.export(out)
        assert done.returncode == 0, (name, done.stderr)
        t.same_as_first(out)
        t.answers(out)
    deep = t.fresh("deep")
    for _ in range(15):
        deep = deep / ("d" * 200)
    deep.mkdir(parents=True)
    t.export(deep)
    t.answers(deep)
    link = t.fresh("links") / "link"
    link.symlink_to(t.out)
    t.answers(link)
    done = t.ask(out=Path(os.path.relpath(t.out, t.work)), cwd=t.work)
    assert done.stdout.decode() == ANSWER, done.stderr
    loop = t.work / "links" / "loop"
    loop.symlink_to(loop)
    failed(t.ask(out=loop), 1, "cannot open")
    failed(t.ask(out=t.work / ("y" * 300)), 1, "cannot open")
    return f"{len(names)} names, 3000 bytes deep, links, a loop of links, a relative one"


@case
def no_permission(t):
    parent = t.fresh("closed")
    parent.chmod(stat.S_IRUSR | stat.S_IXUSR)

    def drop():
        # root may write anywhere, so the command runs as nobody.
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)

    reachable = subprocess.run(t.command("gemma4-export", "--version"), preexec_fn=drop,
                               capture_output=True, check=False)
    if reachable.returncode != 0:
        return "not run: another user cannot reach the commands here"
    done = t.export(parent / "out", preexec_fn=drop)
    failed(done, 1, "closed")
    assert leftovers(parent) == []
    return "a directory that cannot be written"


@case
def two_exports_at_once(t):
    rounds = 40 if t.long else 6
    for _ in range(rounds):
        out = t.fresh("twice")
        arguments = t.command("gemma4-export", "--prequantized", BUNDLE, "--output-dir", out)
        both = [subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
                for _ in range(2)]
        said = [child.communicate(timeout=120)[1].decode() for child in both]
        codes = [child.returncode for child in both]
        assert 0 in codes, (codes, said)
        assert all(code in (0, 1) for code in codes), (codes, said)
        assert not any("panicked" in text for text in said), said
        t.same_as_first(out)
        assert leftovers(out) == leftovers(t.out), leftovers(out)
    return f"{rounds} times, equal bytes"


@case
def little_memory(t):
    limits = [16, 24, 32, 48, 64, 80, 100, 128, 160, 200, 260, 340, 450, 600, 900]
    fates = []
    for mebibytes in limits:
        limit = mebibytes << 20
        few = lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        raw = t.ask("--raw_prompt", "--max_new_tokens", "9", preexec_fn=few)
        if raw.returncode not in (0, 127):
            failed(raw, 3, "memory")
        done = t.ask(preexec_fn=few)
        if done.returncode == 0:
            assert done.stdout.decode() == ANSWER
        elif done.returncode == 127 or b"error while loading shared" in done.stderr:
            fates.append("no start")
            continue
        else:
            failed(done, 3, "memory")
        fates.append(str(done.returncode))
    assert "0" in fates and "3" in fates, fates
    return ", ".join(f"{limit} MiB: {fate}" for limit, fate in zip(limits, fates))


@case
def a_full_disk(t):
    size = (t.out / "model.ptd").stat().st_size
    mount = t.fresh("disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size // 2}", "tmpfs", str(mount)],
                             capture_output=True, check=False).returncode == 0
    if mounted:
        try:
            done = t.export(mount / "out")
            failed(done, 1, "No space left")
            assert leftovers(mount / "out") == [], leftovers(mount / "out")
        finally:
            subprocess.run(["umount", str(mount)], check=True)

    def few():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))

    out = t.fresh("limit") / "out"
    failed(t.export(out, preexec_fn=few), 1, "File too large")
    assert leftovers(out) == [], leftovers(out)
    return ("a full tmpfs and " if mounted else "") + "a limit on files; nothing is left behind"


@case
def weights_that_shrink(t):
    rounds, caught = (40 if t.long else 8), 0
    for _ in range(rounds):
        out = t.fresh("shrink")
        for name in ("model.pte", "model.ptd"):
            shutil.copy(t.out / name, out)
        # Without stop tokens and with all of the context to fill, it runs for seconds.
        arguments = t.command("gemma4-run", *t.files(out), "--device", "cpu", "--temperature", "0",
                              "--logit_bias", "1=-inf,106=-inf", "--prompt", QUESTION)
        child = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 stdin=subprocess.DEVNULL)
        child.stdout.read(20)
        os.truncate(out / "model.ptd", 4096)
        _, said = child.communicate(timeout=120)
        assert child.returncode in (0, 1), (child.returncode, said)
        if child.returncode == 1:
            assert b"became shorter" in said, said
            caught += 1
    assert caught > 0
    out = t.fresh("replace")
    for name in ("model.pte", "model.ptd"):
        shutil.copy(t.out / name, out)
    child = subprocess.Popen(t.command("gemma4-run", *t.files(out), "--device", "cpu", "-q",
                                       "--temperature", "0", "--prompts", "-", "--output", "jsonl"),
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    (out / "other").write_bytes(b"x" * 100)
    time.sleep(0.3)
    (out / "other").replace(out / "model.ptd")
    answers, said = child.communicate(json.dumps(QUESTION).encode() + b"\n", timeout=60)
    assert child.returncode in (0, 1) and b"panicked" not in said, said
    return f"{caught} of {rounds} while mapped: a sentence and exit 1; once replaced by another file"


@case
def interrupts_at_any_moment(t):
    rounds = 60 if t.long else 8
    text = t.work / "text"
    text.write_text(QUESTION * 50)
    whole = t.fresh("whole")
    commands = {
        "export": lambda out: ("gemma4-export", "--prequantized", BUNDLE, "--output-dir", out),
        "quantize": lambda out: ("gemma4-quantize", "--prequantized", BUNDLE, "--output", out),
        "run": lambda out: ("gemma4-run", *t.files(), "--device", "cpu", "--prompt", QUESTION,
                            "--logit_bias", "1=-inf,106=-inf"),
        "bench": lambda out: ("gemma4-bench", *t.files(), "--device", "cpu", "-p", 64, "-n", 32),
    }
    del commands["quantize"]
    checkpoint = os.environ.get("GEMMA4_FIXTURES")
    if checkpoint and (Path(checkpoint) / "ckpt/tiny-31b").is_dir():
        source = Path(checkpoint) / "ckpt/tiny-31b"
        commands["quantize"] = lambda out: ("gemma4-quantize", "--model-dir", source, "--output", out)
    counts = {}
    for name, arguments in commands.items():
        started = time.monotonic()
        subprocess.run(t.command(*arguments(whole / name)), capture_output=True, check=False)
        length = min(time.monotonic() - started, 3.0)
        for _ in range(rounds):
            out = t.fresh("interrupted") / name
            child = subprocess.Popen(t.command(*arguments(out)), stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
            time.sleep(t.random.uniform(0, length))
            child.send_signal(signal.SIGINT)
            _, said = child.communicate(timeout=60)
            # Before a handler is installed, the signal itself ends the process.
            assert child.returncode in (0, 130, -signal.SIGINT), (name, child.returncode, said)
            assert b"panicked" not in said, said
            counts[name] = counts.get(name, 0) + (child.returncode != 0)
            if name in ("export", "quantize"):
                done = t.call(*arguments(out))
                assert done.returncode == 0, done.stderr
                for path in sorted((whole / name).iterdir()):
                    assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    return ", ".join(f"{name}: {count} of {rounds} ended early" for name, count in counts.items())


@case
def a_long_run_is_flat(t):
    # Long: a million tokens of the smallest model, none of whose answers may end by themselves.
    answers, tokens = (10_000, 100) if t.long else (300, 40)
    out = t.work / "smallest"
    done = t.call("gemma4-export", "--model-dir", SMALLEST, "--output-dir", out)
    assert done.returncode == 0, done.stderr
    lines = t.work / "prompts"
    lines.write_text((json.dumps(QUESTION) + "\n") * answers)
    child = subprocess.Popen(t.command("gemma4-run", *t.files(out), "--device", "cpu", "-q", "--output",
                                       "jsonl", "--temperature", "0", "--logit_bias", "1=-inf,106=-inf",
                                       "--max_new_tokens", tokens, "--prompts", lines),
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    sizes, times, first = [], [time.monotonic()], None
    for _ in range(answers):
        answer = json.loads(child.stdout.readline())
        told = answer["text"], answer["ids"]
        first = first or told
        assert told == first and len(told[1]) == tokens, answer
        status = Path(f"/proc/{child.pid}/status").read_text()
        sizes += [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
        times.append(time.monotonic())
    assert child.wait(60) == 0
    tenth = answers // 10
    early, late = max(sizes[:tenth]), max(sizes[-tenth:])
    assert late - early < 4096, f"{early} kB at first, {late} kB at last"
    each = [later - earlier for earlier, later in zip(times, times[1:])]
    before, after = (statistics.median(part) for part in (each[:tenth], each[-tenth:]))
    assert after < 1.5 * before, f"{before:.4f} s an answer at first, {after:.4f} at last"
    return (f"{answers} answers of {tokens} tokens, all equal; {early} kB in the first tenth, {late} kB in "
            f"the last; {1000 * before:.1f} ms an answer at first, {1000 * after:.1f} at last")


@case
def killed_at_any_moment(t):
    rounds = 100 if t.long else 20
    commands = {
        "export": lambda out: ("gemma4-export", "--prequantized", BUNDLE, "--output-dir", out),
        "run": lambda out: ("gemma4-run", *t.files(), "--device", "cpu", "-q", "--prompt", QUESTION,
                            "--stats_json", out / "stats", "--save_session", out / "session"),
    }
    whole, counts = t.fresh("whole"), {}
    for name, arguments in commands.items():
        (whole / name).mkdir()
        started = time.monotonic()
        subprocess.run(t.command(*arguments(whole / name)), capture_output=True, check=True)
        length = time.monotonic() - started
        out = t.fresh("killed")
        for turn in range(rounds):
            child = subprocess.Popen(t.command(*arguments(out)), stdout=subprocess.DEVNULL,
                                     stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
            time.sleep(length * turn / rounds)
            child.kill()
            child.communicate(timeout=60)
            counts[name] = counts.get(name, 0) + (child.returncode == -signal.SIGKILL)
            # What has its final name is whole; sessions and timings differ from run to run.
            for path in out.iterdir():
                if path.name in ("model.pte", "model.ptd"):
                    assert path.read_bytes() == (t.out / path.name).read_bytes(), path.name
                elif path.name == "stats":
                    json.loads(path.read_bytes())
        done = t.call(*arguments(out))
        assert done.returncode == 0, done.stderr
        assert leftovers(out) == leftovers(whole / name), leftovers(out)
        if name == "run":
            done = t.ask("--load_session", out / "session")
            assert done.stdout.decode() == ANSWER, done.stderr
    return ", ".join(f"{name}: {count} of {rounds} in time" for name, count in counts.items())


@case
def calls_on_files_that_fail(t):
    library = t.preload("failing_files")
    if library is None:
        return "not run: no C compiler (cc)"
    source = t.fresh("faulty") / "source"
    shutil.copytree(BUNDLE, source)
    report = t.work / "report"
    model = t.fresh("faulty/model")
    for name in ("model.pte", "model.ptd"):
        shutil.copy(t.out / name, model)
    out = t.work / "faulty/out"
    commands = {
        "export": ("gemma4-export", "--prequantized", source, "--output-dir", out),
        "quantize": ("gemma4-quantize", "--model-dir", SMALLEST, "--output", out),
        "run": ("gemma4-run", *t.files(model), "--device", "cpu", "-q", "--temperature", "0", "--prompt",
                QUESTION),
    }

    def call(arguments, at, code):
        environment = {**os.environ, "LD_PRELOAD": str(library), "FAILING_FILES_REPORT": str(report),
                       "FAILING_FILES_IN": "tiny-31b" if "quantize" in arguments[0] and at % 2 else "/faulty/",
                       "FAILING_FILES_AT": str(at), "FAILING_FILES_ERRNO": str(code)}
        shutil.rmtree(out, ignore_errors=True)
        done = t.call(*arguments, env=environment)
        calls, failed, path = report.read_text().strip().split(" ", 2)
        return done, int(calls), failed, path

    def equal(done):
        assert done.returncode == 0, (done.args, done.returncode, done.stderr)
        assert done.stdout == whole.stdout, (done.args, done.stdout, whole.stdout, done.stderr)
        for path in out.glob("*"):
            assert path.read_bytes() == files[path.name], path.name
        assert leftovers(out) == sorted(files), leftovers(out)

    said = []
    for name, arguments in commands.items():
        files = {}
        whole, calls, _, _ = call(arguments, 0, errno.EIO)
        assert whole.returncode == 0, (name, whole.returncode, whole.stderr)
        files = {path.name: path.read_bytes() for path in out.glob("*")}
        if name != "quantize":
            equal(call(arguments, 0, 0)[0])
        told = 0
        stride = 1 if t.long else max(1, calls // 40)
        for at in range(1, calls + 1, stride):
            equal_again, _, failed, path = call(arguments, at, errno.EINTR)
            # Not among the calls that a signal can interrupt.
            if failed not in ("rename", "mkdir", "mmap"):
                equal(equal_again)
            done, _, failed, path = call(arguments, at, [errno.EIO, errno.ENOSPC][at // stride % 2])
            if done.returncode == 0:
                equal(done)
                continue
            told += 1
            failed_path = Path(path)
            names = {failed_path.name, failed_path.name.removeprefix(".").removesuffix(".partial")}
            failed_words(done, names | {failed_path.parent.name} if failed == "mkdir" else names)
            for path in out.glob("*"):
                assert name != "run" and path.read_bytes() == files.get(path.name), (at, failed, path)
            if name == "quantize":
                equal(t.call(*arguments))
        assert told > 0, name
        said.append(f"{name}: {told} of {len(range(1, calls + 1, stride))} that failed were told")
    return ", ".join(said) + "; the others did not matter; interrupted and short ones were repeated"


@case
def clocks_that_go_wrong(t):
    library = t.preload("odd_clock")
    if library is None:
        return "not run: no C compiler (cc)"
    kinds = ("stopped", "back", "jumps", "ancient", "far")
    for kind in kinds:
        environment = {**os.environ, "LD_PRELOAD": str(library), "ODD_CLOCK": kind}
        done = t.export(t.fresh("clock"), env=environment)
        assert done.returncode == 0, (kind, done.stderr)
        t.same_as_first(t.work / "clock")
        done = t.ask("--output", "json", env=environment)
        assert done.returncode == 0, (kind, done.stderr)
        answer = json.loads(done.stdout, parse_constant=lambda word: 1 / 0)
        assert answer["text"] == ANSWER.strip(), (kind, answer)
        for key, value in answer["stats"].items():
            assert not isinstance(value, float) or 0 <= value < 1e12, (kind, key, value)
        # Without a seed, it may come from the clock.
        done = t.call("gemma4-run", *t.files(), "--device", "cpu", "--prompt", QUESTION, env=environment)
        assert done.returncode == 0 and b"-" not in done.stderr.split(b"generated")[-1], (kind, done.stderr)
        done = t.call("gemma4-bench", *t.files(), "--device", "cpu", "-p", 8, "-n", 4, "-r", 2, env=environment)
        assert done.returncode == 0 and b"panicked" not in done.stderr, (kind, done.stderr)
    future = t.fresh("future")
    shutil.copytree(BUNDLE, future / "bundle")
    for moment in (0, 2**33, 2**40):
        for path in (future / "bundle").iterdir():
            os.utime(path, (moment, moment))
        done = t.call("gemma4-export", "--prequantized", future / "bundle", "--output-dir", future / "out")
        assert done.returncode == 0, done.stderr
        t.same_as_first(future / "out")
        for path in (future / "out").iterdir():
            os.utime(path, (moment, moment))
        t.answers(future / "out")
    return f"{', '.join(kinds)}; files of 1970, 2242 and the year 36812"


@case
def languages_and_bytes(t):
    places = [{"LC_ALL": "C"}, {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"}, {"LC_ALL": "nonsense"},
              {"TZ": ":/nonexistent"}, {"TZ": "XYZ+99:99"}, {"TZ": ""}, {"LC_NUMERIC": "de_DE.UTF-8"}]
    for place in places:
        environment = {**os.environ, **place}
        out = t.fresh("language")
        done = t.export(out, env=environment)
        assert done.returncode == 0, (place, done.stderr)
        t.same_as_first(out)
        done = t.ask("--output", "json", env=environment)
        assert json.loads(done.stdout)["text"] == ANSWER.strip(), (place, done)
    out = Path(os.fsdecode(os.fsencode(t.fresh("bytes")) + b"/out-\xff"))
    done = t.export(out)
    assert done.returncode == 0, done.stderr
    t.same_as_first(out)
    t.answers(out)
    failed(t.ask(out=Path(os.fsdecode(os.fsencode(t.work) + b"/no-\xff"))), 1, "cannot open")
    wrong = t.call("gemma4-run", *t.files(), "--device", "cpu", "--prompt", os.fsdecode(b"a\xffb"))
    failed(wrong, 2, "UTF-8")
    prompt = t.work / "latin"
    prompt.write_bytes(b"a\xffb")
    failed(t.ask("--prompt_file", prompt), 1, "UTF-8", "latin")
    return f"{len(places)} languages and time zones; bytes that are no UTF-8 in a path, an argument, a file"


@case
def text_that_lies(t):
    long = t.work / "long"
    with open(long, "w") as file:
        for _ in range(200):
            file.write("abcdefgh " * 116_509)
    started = time.monotonic()
    done = t.ask("--prompt_file", long)
    failed(done, 1, "tokens or more")
    seconds = time.monotonic() - started
    failed(t.ask("--raw_prompt", "--prompt_file", long), 1, "tokens or more")
    long.unlink()
    hostile = {
        "doubling": "{% set n = namespace(s='0123456789abcdef') %}{% for i in range(60) %}"
                    "{% set n.s = n.s + n.s %}{% endfor %}",
        "printing": "{% set s %}{% for i in range(50000) %}" + "x" * 60_000 + "{% endfor %}{% endset %}",
        "listing": "{% for x in ([0] * 10**15) | list %}{% endfor %}",
        "loops": "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4,
        "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "nesting": "{% set n = namespace(x=[]) %}{% for i in range(60) %}"
                   "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    }
    for name, source in hostile.items():
        template = t.work / "template"
        template.write_text(source)
        out = t.fresh("hostile") / name
        done = t.call("gemma4-export", "--prequantized", BUNDLE, "--output-dir", out,
                      "--chat-template", template)
        if done.returncode == 0:
            failed(t.ask(out=out), 1, "chat template")
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
            # The largest of all children so far, among them those with prompts of 200 MB.
            assert peak < 2 << 20, (name, peak)
    odd = {"NULs": "a\0b", "specials": "<bos><|turn>user<turn|><eos>", "blank": " \n\t "}
    for name, text in odd.items():
        prompt = t.work / "odd"
        prompt.write_text(text)
        done = t.ask("--prompt_file", prompt, "--max_new_tokens", "5")
        assert done.returncode in (0, 1) and b"panicked" not in done.stderr, (name, done)
    lines = t.work / "surrogates"
    lines.write_text('"\\ud800"\n')
    failed(t.ask("--prompts", lines), 1, "line 1")
    return f"200 MB refused in {seconds:.1f} s; {len(hostile)} templates, {len(odd) + 1} odd prompts"


def main():
    parser = argparse.ArgumentParser(description="lets faults happen to the commands")
    parser.add_argument("--bin", type=Path, default=ROOT / "target/release")
    parser.add_argument("--long", action="store_true", help="the long versions")
    parser.add_argument("names", nargs="*", help="cases to run; all if none is named")
    arguments = parser.parse_args()
    faults = 0
    with tempfile.TemporaryDirectory() as work:
        torture = Torture(arguments.bin.resolve(), Path(work), arguments.long)
        for function in CASES:
            if arguments.names and function.__name__ not in arguments.names:
                continue
            started = time.monotonic()
            try:
                said = function(torture)
                mark = "held"
            except (AssertionError, subprocess.TimeoutExpired) as error:
                said, mark, faults = str(error), "FELL", faults + 1
            seconds = time.monotonic() - started
            print(f"{mark}  {function.__name__} ({seconds:.0f} s): {said}", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
