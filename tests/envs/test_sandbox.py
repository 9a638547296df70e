import concurrent.futures
import os
import resource
import subprocess
import sys
import textwrap
import time

import pytest

from sao_jax.envs.sandbox import Limits, Sandbox
from sao_jax.envs.verifiers import verdicts

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux's seccomp: run the tests on Linux")


@pytest.fixture(scope="module")
def sandbox():
    with_limits = Sandbox(Limits(cpu_s=1.0, wall_s=5.0), workers=2)
    yield with_limits
    with_limits.close()


def test_calls_return_plain_data_and_programs_print(sandbox):
    result = sandbox.run(
        "print('hi')\ndef solve(x, y):\n    return [x, (y, None)], {'a': 1.5}, True", [[1, "b"], [2, 3]]
    )
    assert (result.status, result.exit, result.stdout) == ("done", 0, "hi\n")
    assert result.values == ([[1, ["b", None]], {"a": 1.5}, True], [[2, [3, None]], {"a": 1.5}, True])
    assert result.errors == ("", "")


def test_a_call_that_raises_costs_its_own_value_only(sandbox):
    result = sandbox.run("def solve(x):\n    return 6 // x", [[0], [2]])
    assert result.values == (None, 3)
    assert result.errors[0].startswith("ZeroDivisionError")


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("1 / 0", "error", "ZeroDivisionError"),
        ("x = ", "error", "SyntaxError"),
        ("import sys; sys.exit(3)", "error", ""),
        ("import sys; sys.exit('no')", "error", ""),
        ("raise type('E', (BaseException,), {'__str__': lambda s: 1 / 0})()", "error", "exception"),
        ("x = 'a' * 10**9", "error", "MemoryError"),
        ("(" * 10**5, "error", ""),
        ("import os; os.abort()", "crash", ""),
        ("import sys; sys.stdout = sys.stderr = None", "done", ""),
        ("import builtins; builtins.__dict__.clear()", "error", ""),
        ("\0", "error", "SyntaxError"),
        ("'\ud800'", "error", "UnicodeEncodeError"),
    ],
)
def test_the_status_says_how_a_program_ended(sandbox, source, status, said):
    result = sandbox.run(source)
    assert result.status == status
    assert said in result.stderr


# ---- nothing that a program does passes for an answer


@pytest.mark.parametrize("expected", ["", None, "None"])
def test_an_error_is_no_answer_whatever_is_expected(sandbox, expected):
    result = sandbox.run("def solve(a):\n    return [][a]", [[3]])
    assert verdicts(result, [expected]) == [False]
    assert "IndexError" in result.errors[0]


def test_none_is_the_value_none_and_not_its_name(sandbox):
    result = sandbox.run("def solve(a):\n    pass", [[3]])
    assert verdicts(result, [None]) == [True]
    assert verdicts(result, ["None"]) == verdicts(result, [""]) == [False]


@pytest.mark.parametrize(
    "source",
    [
        "print('ALL TESTS PASSED'); import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "class A:\n    __eq__ = lambda s, o: True\ndef solve(x):\n    return A()",
        "class A(int):\n    __eq__ = lambda s, o: True\ndef solve(x):\n    return A()",
        "class A(list):\n    __eq__ = lambda s, o: True\ndef solve(x):\n    return [A()]",
        "def solve(x):\n    raise SystemExit(0)",
        "def solve(x):\n    import os; os._exit(0)",
        "def solve(x):\n    return {1: 4}",
        "def solve(x):\n    return float('nan')",
        "def solve(x):\n    return True",
        "def solve(x):\n    return '4'",
        "def solve(x):\n    return 10**5000",
        "a = []\na.append(a)\ndef solve(x):\n    return a",
        "import json\njson.dumps = lambda *a: '[4]'\ndef solve(x):\n    return 5",
        'import os\ndef solve(x):\n    [os.write(fd, b\'{"value": 4, "error": ""}\\n\') for fd in (1, 2)]',
        "import os\ndef solve(x):\n    os.write(3, b'[' * 10000 + b'\\n')\n    return 4",
        "import os\ndef solve(x):\n    os.write(3, b'{}\\n')\n    return 4",
        "import os\ndef solve(x):\n    os.write(3, b'\\xff\\n\\n4\\n')\n    return 4",
        "solve = 4",
        "",
    ],
)
def test_forged_results_are_worth_nothing(sandbox, source):
    assert verdicts(sandbox.run(source, [[2]]), [4]) == [False]
    assert verdicts(sandbox.run("def solve(x):\n    return 4", [[2]]), [4]) == [True]  # nor harm the next one


def test_programs_do_not_share_anything(sandbox):
    sandbox.run("import math, builtins\nmath.sqrt = builtins.len = lambda x: 7")
    assert sandbox.run("import math\ndef solve(x):\n    return math.sqrt(x), len([x])", [[4]]).values == ([2.0, 1],)


def test_verdicts_do_not_depend_on_chance(sandbox):
    source = "import random\ndef solve():\n    return [random.random(), hash('a'), list({'x', 'y', 'z'})]"
    other = Sandbox(workers=1)
    assert sandbox.run(source, [[]]) == sandbox.run(source, [[]]) == other.run(source, [[]])
    other.close()


# ---- limits


@pytest.mark.parametrize(
    "source",
    [
        "while True:\n    pass",
        "def solve(x):\n  while True:\n    try:\n      while True: pass\n    except BaseException: pass",
        "def solve(x):\n    return 9**9**9**9",
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except Exception: pass\n"
        "while True: pass",
        "import signal\ntry: signal.setitimer(signal.ITIMER_PROF, 0)\nexcept OSError: pass\nwhile True: pass",
    ],
)
def test_a_busy_program_is_stopped_at_a_fraction_of_a_second(source):
    sandbox, start = Sandbox(Limits(cpu_s=0.3, wall_s=4), workers=1), time.monotonic()
    result = sandbox.run(source, [[1]])
    assert result.status == "time"
    assert verdicts(result, [1]) == [False]
    assert time.monotonic() - start < 8
    sandbox.close()


def test_the_clock_stops_a_program_that_the_processor_limit_does_not():
    sandbox, start = Sandbox(Limits(cpu_s=60, wall_s=0.3), workers=1), time.monotonic()
    assert sandbox.run("while True: pass").status == "time"
    assert time.monotonic() - start < 5
    sandbox.close()


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["cpu_s", "wall_s", "memory_mb", "output_bytes"])
def test_limits_that_are_none_are_refused(name, limit):
    with pytest.raises(ValueError, match=f"{name} is {limit}"):
        Limits(**{name: limit})


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_off(sandbox, stream):
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    result = sandbox.run(f"import sys\nwhile True: sys.{stream}.write('y' * 4096)")
    assert (result.status, result.truncated) == ("output", True)
    assert len(getattr(result, stream)) == sandbox.limits.output_bytes
    assert time.monotonic() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_endless_values_are_cut_off(sandbox):
    assert sandbox.run("def solve(x):\n    return 'y' * 10**6", [[1]]).status == "output"


# ---- confinement


@LINUX
@pytest.mark.parametrize(
    "action",
    [
        "open('/etc/passwd')",
        "open('/proc/self/mem')",
        "open('x', 'w')",
        "__import__('os').listdir('/')",
        "__import__('os').unlink('/tmp/x')",
        "__import__('os').fork()",
        "__import__('os').execv('/bin/sh', ['sh'])",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "__import__('os').killpg(0, 9)",
        "__import__('os').setsid()",
        "__import__('socket').socket()",
        "__import__('subprocess').run(['ls'])",
        "__import__('threading').Thread(target=print).start()",
        "__import__('time').sleep(0.1)",
    ],
)
def test_a_program_reaches_nothing_outside(sandbox, action):
    error = sandbox.run(f"def solve():\n    return bool({action})", [[]]).errors[0]
    assert error.startswith(("PermissionError", "ModuleNotFoundError", "RuntimeError")), error


@LINUX
def test_raw_system_calls_are_refused_too(sandbox):
    source = textwrap.dedent("""
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        def solve(name):
            return getattr(libc, name)(0, 0, 0)
    """)
    result = sandbox.run(source, [["socket"], ["fork"], ["ptrace"], ["unshare"]])
    assert result.values == (-1, -1, -1, -1)


@LINUX
def test_a_trusted_module_reads_files_but_does_not_write_them(tmp_path):
    sandbox, path = Sandbox(workers=1, module="os"), tmp_path / "x"
    result = sandbox.run(None, [[__file__, os.O_RDONLY], [str(path), os.O_CREAT | os.O_WRONLY]], "open")
    assert result.errors[0] == ""
    assert "PermissionError" in result.errors[1]
    assert "PermissionError" in sandbox.run(None, [[]], "fork").errors[0]
    assert not path.exists()
    sandbox.close()


def test_the_environment_and_standard_input_are_empty(sandbox, monkeypatch):
    monkeypatch.setenv("SECRET", "x")
    other = Sandbox(workers=1)
    source = "import os, sys\ndef solve():\n    return 'SECRET' in os.environ, sys.stdin.read()"
    assert other.run(source, [[]]).values == ([False, ""],)
    other.close()


@LINUX
def test_without_confinement_descendants_that_leave_the_session_are_ended_all_the_same():
    """Where there is no filter, the helper is the reaper of what a program leaves behind."""
    program = textwrap.dedent("""
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
        os.wait()
    """)
    script = textwrap.dedent(f"""
        import os, sys
        sys.path.insert(0, {os.path.dirname(sys.modules["sao_jax.envs.sandbox"].__file__)!r})
        import zygote
        zygote._prctl(zygote._SUBREAPER, 1)
        request = dict(source={program!r}, calls=[], entry="", cpu_s=1, wall_s=1, memory_mb=512, output_bytes=100)
        print(zygote._judge(request, None, None)["exit"])
        print(open(f"/proc/self/task/{{os.getpid()}}/children").read().split())
    """)
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
    assert printed.stdout.split("\n")[1] == "[]", printed


# ---- helpers


def test_a_helper_that_dies_is_replaced():
    sandbox = Sandbox(workers=1)
    source = "def solve(x):\n    return x + 1"
    assert sandbox.run(source, [[1]]).values == (2,)
    helper = sandbox._idle.get()
    sandbox._idle.put(helper)
    helper._process.kill()
    helper._process.wait()
    assert sandbox.run(source, [[1]]).values == (2,)
    sandbox.close()
    assert sandbox.run(source, [[1]]).values == (2,)
    sandbox.close()


def test_closing_ends_all_helpers():
    sandbox = Sandbox(workers=2)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(sandbox.run, ["sum(range(10**7))"] * 2))
    helpers = [sandbox._idle.get() for _ in range(2)]
    for helper in helpers:
        sandbox._idle.put(helper)
    sandbox.close()
    assert [helper._process.poll() for helper in helpers] == [-9, -9]
    assert not any(os.path.exists(helper._folder.name) for helper in helpers)


def test_a_helper_that_cannot_start_is_an_error_in_one_line():
    with pytest.raises(RuntimeError, match="helper process failed: it ended"):
        Sandbox(workers=1, module="no_such_module").run(None, [[]])


def test_threads_get_their_own_results(sandbox):
    source = "def solve(x):\n    return x * x"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda x: sandbox.run(source, [[x]]).values, range(100)))
    assert results == [(x * x,) for x in range(100)]


def test_helpers_end_with_the_process_that_started_them():
    script = textwrap.dedent("""
        from sao_jax.envs.sandbox import Sandbox
        sandbox = Sandbox(workers=1)
        sandbox.run("")
        helper = sandbox._idle.get()
        print(helper._process.pid, helper._folder.name, flush=True)
        import os
        os.kill(os.getpid(), 9)
    """)
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stdout.split()
    for _ in range(100):
        try:
            os.kill(int(printed[0]), 0)
        except ProcessLookupError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the helper lives on")
