"""A learner over several processes: what they tell each other, and what happens when one of them is gone."""

import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Client, Listener

import pytest
from helpers import (
    MODEL_FLAGS,
    Record,
    SilentDisplay,
    cache_folder,
    compilation_environment,
    host,
    quick_compile,  # noqa: F401
    random_rows,
)

from experiments import train as command
from sao_jax.runtime import hosts, wire
from sao_jax.runtime.config import RunConfig
from sao_jax.runtime.devices import data_mesh
from sao_jax.runtime.hosts import EXIT_LOST, HostLost
from sao_jax.runtime.ledger import Ledger, LedgerError
from sao_jax.runtime.replay import compare, replay
from sao_jax.runtime.run import family_and_context, make_learner
from sao_jax.runtime.shared_learner import Share, SharedLearner
from sao_jax.runtime.signals import Interrupted

FLAGS = dict(
    **MODEL_FLAGS, rollouts=80, batch_size=4, slots=8, burst=4, warm_start_steps=12, warm_start_lr=0.03,
    demonstrations=20, warm_start_batch=8, preheat_rollouts=8, preheat_epochs=2, eval_tasks=4, eval_every=0,
    checkpoint_every=2, devices=1, lr=1e-3,
)  # fmt: skip


# -- flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (dict(num_hosts=2, host_index=3, coordinator="h:1"), "--host-index is 3; it must lie in [0, 2)"),
        (dict(num_hosts=0), "--num-hosts is 0; it must be at least 1"),
        (dict(host_index=0), "--host-index has no effect here; it needs --num-hosts of at least 2"),
        (dict(coordinator="h:1"), "--coordinator has no effect here"),
        (dict(num_hosts=2, coordinator="h:1"), "--coordinator and --host-index go together"),
    ],
)
def test_flags_that_do_not_fit_together(flags, says):
    with pytest.raises(ValueError, match="--") as error:
        command.check_hosts(command.Flags(**flags))
    assert says in str(error.value)


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.1:", ":4300", "a:b", "a:70000"])
def test_addresses(address):
    with pytest.raises(ValueError, match="takes HOST:PORT"):
        hosts.parse_address(address)
    assert hosts.parse_address("10.0.0.1:4300") == ("10.0.0.1", 4300)
    assert hosts.parse_address("[::1]:4300") == ("::1", 4300)


def test_flags_of_other_runs(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "--seed", "1", "--host-index", "1", "--clock=cpu", "--host_index=1"])
    assert command.shared_flags() == ["--seed", "1", "--clock=cpu"]
    monkeypatch.setattr(sys, "argv", ["train", "--clock", "cpu", "--num-hosts", "2"])
    with pytest.raises(ValueError, match="--clock cpu counts the work of one process"):
        command.main(None)


def test_a_secret_is_needed(monkeypatch):
    monkeypatch.delenv(hosts.TOKEN, raising=False)
    with pytest.raises(ValueError, match="SAO_TOKEN"):
        hosts.lead(("127.0.0.1", 1), 2, [], lambda: None)


# -- the connection ----------------------------------------------------------------------------------------------------


@pytest.fixture
def forced(monkeypatch):
    """Lines and exit codes with which threads wanted to end this process."""
    ends, made, start = [], [], hosts._End.start
    monkeypatch.setattr(hosts._End, "start", lambda end: (made.append(end), start(end)))
    monkeypatch.setattr(hosts, "_end_by_force", lambda line, after_s, code: ends.append((line, code)))
    monkeypatch.setattr(hosts, "ALIVE_S", 0.05)
    monkeypatch.setattr(hosts, "leave_jax", lambda: None)
    monkeypatch.setattr(hosts.atexit, "register", lambda *call: ends.append(call[1:]))
    monkeypatch.setenv(hosts.TOKEN, "secret")
    yield ends
    for end in made:  # their threads live on, and are to end nothing
        end._lost, end._ended = "the test is over", True


class Leading:
    """`hosts.lead` on a thread, since it waits for the others."""

    def __init__(self, count=2, arguments=("--seed", "1"), **welcome):
        self.address = ("127.0.0.1", hosts.free_port("127.0.0.1"))
        self._work = lambda: hosts.lead(self.address, count, arguments, lambda: None, **welcome)
        self._result = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self._result = self._work()
        except (ValueError, HostLost) as error:
            self._result = error

    def result(self):
        self._thread.join(20)
        assert self._result is not None, "nobody was led"
        return self._result


def knock(leading, index=1, arguments=("--seed", "1"), secret=b"secret"):
    """A host that says hello and nothing else."""
    deadline = time.monotonic() + 20
    while True:
        try:
            connection = Client(leading.address, authkey=secret)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    wire.send(connection, "hello", index=index, arguments=list(arguments), versions=hosts._versions())
    return connection


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def connect(leading):
    """Some other program, which knows neither the secret nor what to say."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(leading.address)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_one_that_connects_and_says_nothing_holds_up_nobody(forced, monkeypatch):
    monkeypatch.setattr(hosts, "GREETING_S", 600.0)
    leading = Leading()
    with connect(leading), connect(leading) as nonsense:
        nonsense.sendall(b"\0\0\0\4GET ")
        connection = knock(leading)
        assert isinstance(leading.result(), hosts.Leader), "the silent one was waited for"
    connection.close()


def test_one_that_says_nothing_is_sent_away(forced, monkeypatch):
    monkeypatch.setattr(hosts, "GREETING_S", 0.3)
    leading = Leading()
    with connect(leading) as silent:
        silent.settimeout(20)
        while silent.recv(4096):
            pass  # the challenge; then the end of the connection, or this would time out
    monkeypatch.setattr(hosts, "GREETING_S", 600.0)
    connection = knock(leading)
    assert isinstance(leading.result(), hosts.Leader)
    connection.close()


def test_calls_come_in_order_and_the_end_last(forced):
    leading = Leading(devices=3)
    follower, welcome = hosts.follow(leading.address, 1, ["--seed", "1"], lambda: None)
    leader, heard = leading.result(), []

    def work():
        heard.extend((message["kind"], payload) for message, payload in follower.commands())
        follower.leave()

    thread = threading.Thread(target=work)
    thread.start()
    with leader:
        for number in range(50):
            leader.tell("put", str(number).encode())
    thread.join(20)
    assert welcome["devices"] == 3
    assert heard == [("put", str(number).encode()) for number in range(50)]
    assert follower.exit_code == 0
    leader.check()
    until(lambda: forced == [(None, EXIT_LOST)])  # the follower's, in case that what it was told had never ended


def test_a_signal_to_a_follower_stops_the_run(forced):
    leading = Leading()
    follower, _ = hosts.follow(leading.address, 1, ["--seed", "1"], lambda: None)
    leader = leading.result()
    threading.Thread(target=lambda: list(follower.commands(lambda: signal.SIGTERM)), daemon=True).start()

    def stopped():
        try:
            leader.check()
        except Interrupted as interrupted:
            return interrupted.exit_code == 143

    until(stopped)
    with pytest.raises(Interrupted), leader:
        leader.check()
    until(lambda: follower.exit_code == 143)


def test_a_host_that_is_gone_is_noticed_at_once(forced):
    leading = Leading()
    connection = knock(leading)
    leader = leading.result()
    leader.check()
    connection.close()
    until(lambda: forced, 2.0)
    with pytest.raises(HostLost, match=r"host 1 is gone \(its connection is closed\)"), leader:
        leader.check()
    assert [code for _, code in forced[:1]] == [EXIT_LOST]


def test_what_a_compiled_call_raises_is_put_down_to_the_host_that_is_gone(forced):
    leading = Leading()
    connection = knock(leading)
    leader = leading.result()
    threading.Timer(0.2, connection.close).start()
    with pytest.raises(HostLost, match="host 1 is gone"), leader:
        raise RuntimeError("all-reduce failed")  # before the end of the connection is seen


@pytest.mark.parametrize("sent", [b"", struct.pack("!i", 100) + b"half of it"], ids=["nothing", "half a message"])
def test_a_host_that_is_silent_counts_as_gone(forced, monkeypatch, sent):
    monkeypatch.setattr(hosts, "SILENCE_S", 0.3)
    leading = Leading()
    connection = knock(leading)
    leader = leading.result()
    os.write(connection.fileno(), sent)
    until(lambda: forced, 5.0)
    with pytest.raises(HostLost, match=r"no sign of life for 0\.3 s"):
        leader.check()
    connection.close()


def test_a_leader_that_answers_nobody_is_given_up(forced, monkeypatch):
    monkeypatch.setattr(hosts, "GREETING_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as frozen, pytest.raises(HostLost, match="does not answer"):
        hosts.follow(frozen.getsockname(), 1, [], lambda: None)


def test_a_leader_that_never_welcomes_anyone_is_given_up(forced, monkeypatch):
    monkeypatch.setattr(hosts, "START_S", 0.3)
    listener = Listener(("127.0.0.1", 0), authkey=b"secret")
    kept = []
    threading.Thread(target=lambda: kept.append(listener.accept()), daemon=True).start()
    with pytest.raises(HostLost, match="does not answer"):
        hosts.follow(listener.address, 1, [], lambda: None)
    listener.close()


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        (dict(index=2), "--host-index 2; it is taken already, or not below --num-hosts 2"),
        (dict(arguments=["--seed", "2"]), "host 1 was started with other flags than host 0"),
    ],
)
def test_a_host_that_does_not_fit_is_refused(forced, hello, says):
    leading = Leading()
    connection = knock(leading, **hello)
    assert says in str(leading.result())
    assert says in wire.receive(connection)[0]["reason"]


def test_strangers_are_not_let_in(forced, monkeypatch):
    leading = Leading()
    with pytest.raises(Exception, match="digest sent was rejected"):
        knock(leading, secret=b"guessed")
    monkeypatch.setenv(hosts.TOKEN, "other")
    with pytest.raises(ValueError, match="has another secret in SAO_TOKEN"):
        hosts.follow(leading.address, 1, [], lambda: None)
    connection = knock(leading)
    leading.result().check()
    connection.close()


BLOCKED = """
import time
from sao_jax.runtime import hosts, wire
hosts.GRACE_S = 0.3
ours, theirs = wire.pair()
{end}.start()
theirs.close()
time.sleep(60)  # a compiled call that waits for the host that is gone
"""


@pytest.mark.parametrize(
    ("end", "says"),
    [("hosts.Leader({1: ours})", "host 1 is gone"), ("hosts.Follower(ours, 1)", "host 1: the leader is gone")],
    ids=["leader", "follower"],
)
def test_a_process_whose_main_thread_is_blocked_ends_all_the_same(end, says, request):
    command = [sys.executable, "-c", BLOCKED.replace("{end}", end)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=request.config.rootpath)
    assert ended.returncode == EXIT_LOST
    assert ended.stderr.startswith("stopped: " + says)
    assert len(ended.stderr.splitlines()) == 1


# -- the learner -------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.told = []

    def tell(self, kind, payload=b"", **fields):
        json.dumps(fields)
        self.told.append(({"kind": kind, **fields}, payload))


@pytest.mark.slow
def test_what_is_told_makes_the_same_learner():
    flags = FLAGS | dict(devices=2, shard_params=True, critic_update="batch")
    config = RunConfig(**flags, task="tiny:turns=2").resolved()
    family, context = family_and_context(config)
    recorder = Recorder()
    learner = SharedLearner(make_learner(config, family, context, data_mesh(2)), recorder)
    rows = random_rows(3, 8, length=context, vocab=family.tokenizer.vocab_size)
    before = host(learner.state)
    learner.start(host(learner.published_policy()))
    learner.critic_only = True
    for row in rows[:4]:
        learner.put(row)
    learner.update()
    learner.score([[row] for row in rows[:2]])
    learner.critic_only = False
    learner.critic_only = False
    for row in rows[4:7]:
        learner.put(row)
    learner.accumulate()
    learner.put(rows[7])
    learner.update()
    kinds = [message["kind"] for message, _ in recorder.told]
    assert kinds.count("critic_only") == 2
    assert kinds.count("put") == 8
    share = Share(config)
    for message, payload in recorder.told:
        share.obey(message, payload)
    assert share._learner.version == learner.version == 1
    assert compare(host(learner.state), host(share._learner.state))["identical"]
    assert not compare(host(learner.state), before)["identical"]
    recorder.told.clear()
    learner.load(learner.whole_state(), 7)
    share.obey(*recorder.told[-1])
    assert share._learner.version == 7
    assert compare(host(learner.state), host(share._learner.state))["identical"]


# -- runs --------------------------------------------------------------------------------------------------------------


class Command:
    """`experiments.train` in a session of its own, which ends with the test; its output goes to a file."""

    def __init__(self, folder: pathlib.Path, request, *arguments):
        self.output = folder / f"out-{time.monotonic_ns()}.txt"
        environment = os.environ | compilation_environment(cache_folder(request.config))
        with self.output.open("w") as out:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "experiments.train", *map(str, arguments)],
                cwd=request.config.rootpath, stdout=out, stderr=subprocess.STDOUT,
                env=environment | {"JAX_PLATFORMS": "cpu", hosts.TOKEN: "a secret"},
            )  # fmt: skip
        request.addfinalizer(self.end)

    def end(self):
        for pid in self.children():
            os.kill(pid, signal.SIGKILL)
        self.popen.kill()
        self.popen.wait()

    def children(self, *words) -> list[int]:
        """Processes that it has started and whose command lines hold `words`, in order."""
        try:
            pids = pathlib.Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        except OSError:
            return []
        return [int(pid) for pid in pids if " ".join(words) in _command_line(pid)]

    def wait(self, seconds=400.0) -> int:
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended in {seconds} s: {self.text()[-3000:]}") from None

    def text(self) -> str:
        return self.output.read_text()


def _command_line(pid) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def arguments(folder, request, **flags):
    flags = FLAGS | flags | {"run_dir": folder / "run"}
    flags["task"] = f"{request.config.rootpath}/tests/helpers.py:Tiny:turns=2,wait=0.02"
    return [item for name, value in flags.items() for item in (f"--{name.replace('_', '-')}", str(value))]


def updates(folder):
    try:
        with Ledger(folder / "ledger.sqlite", read_only=True) as ledger:
            return sum(1 for _ in ledger.events(kinds=("update",)))
    except LedgerError:
        return 0


def assert_whole(record, rollouts):
    """Nothing was lost and nothing was trained twice."""
    assert record.counts["running"] == record.counts["finished"] == 0
    assert sorted(record.trained) == list(range(8, 8 + rollouts))
    assert [payload["version"] for payload in record.of_kind("update")] == list(range(1, rollouts // 4 + 1))


@pytest.mark.slow
def test_a_run_of_two_processes_outlives_both_of_them(tmp_path, request):
    run = tmp_path / "run"
    launcher = Command(tmp_path, request, *arguments(tmp_path, request), "--num-hosts", 2)
    for index in (1, 0):
        before = updates(run)
        until(lambda b=before: updates(run) > b + 2 or launcher.popen.poll() is not None, 400.0)
        (pid,) = launcher.children("--host-index", str(index))
        os.kill(pid, signal.SIGKILL)
        until(lambda p=pid: p not in launcher.children(), 60.0)
        assert updates(run) < 20, "the run had ended before the kill"
    assert launcher.wait() == 0, launcher.text()[-3000:]
    output = launcher.text()
    assert output.count("all are started again") == 2, output[-3000:]
    assert "stopped: host 1 is gone" in output
    assert_whole(Record(run), 80)
    # One process with two devices finds the parameters of two processes with one each, bit by bit.
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"devices": 2}))
    figures = replay(run, tmp_path / "replay", SilentDisplay())
    assert figures["version"] == 20
    assert figures["identical"], figures


@pytest.mark.slow
def test_hosts_of_a_cluster_end_together_and_one_of_them_goes_on_alone(tmp_path, request):
    run = tmp_path / "run"
    where = ("--coordinator", f"127.0.0.1:{hosts.free_port('127.0.0.1')}", "--num-hosts", 2)
    flags = [*arguments(tmp_path, request), *where, "--host-index"]
    leader, follower = Command(tmp_path, request, *flags, 0), Command(tmp_path, request, *flags, 1)
    until(lambda: updates(run) > 2 or leader.popen.poll() is not None, 400.0)
    follower.popen.kill()
    assert follower.wait() == -signal.SIGKILL
    began = time.monotonic()
    assert leader.wait(100.0) == EXIT_LOST, leader.text()[-3000:]
    assert time.monotonic() - began < hosts.GRACE_S + 10
    said = [line for line in leader.text().splitlines() if line.startswith("stopped:")]
    assert said == ["stopped: host 1 is gone (its connection is closed); start all again with --resume"]
    assert "Traceback" not in leader.text()
    assert updates(run) < 20, "the run had ended before the kill"
    alone = Command(tmp_path, request, "--resume", run)
    assert alone.wait() == 0, alone.text()[-3000:]
    assert_whole(Record(run), 80)
