import os
import random
import shutil
import signal
import time

import hypothesis
import hypothesis.strategies as st
import pytest

from sao_jax.data.protocols import TURN_LIMIT, Outcome
from sao_jax.envs import coq
from sao_jax.envs.base import Instance, demonstration
from sao_jax.envs.coq import ARITHMETIC, LOGIC, MISSING, Coq, Coqtop, Problem, entries, instantiated, is_tactic, joined

needs_coq = pytest.mark.skipif(shutil.which("coqtop") is None, reason=MISSING)
COMMUTES = Problem(
    "forall A B : Prop, A /\\ B -> B /\\ A", ("intros.", "destruct H.", "split.", "assumption.", "assumption.")
)
BY_INDUCTION = Problem(
    "forall n : nat, n + 0 = n", ("induction n.", "reflexivity.", "simpl.", "rewrite IHn.", "reflexivity.")
)


@pytest.fixture
def live():
    """Starts an attempt; all processes end with the test."""
    started = []

    def start(problem, **options):
        environment = Coq(**options).environment()
        started.append(environment)
        return environment, environment.reset(Instance("coq", "train", 0, problem))

    yield start
    for environment in started:
        environment._coqtop.close()


@needs_coq
def test_an_attempt_from_prompt_to_the_end_of_the_proof(live):
    environment, prompt = live(COMMUTES)
    assert prompt == "forall A'B: Prop,A&B>B&A?"
    seen = [environment.step(tactic).observation for tactic in COMMUTES.script[:4]]
    assert seen == ["H:A&B/B&A", "H:A,H0:B/B&A", "H:A,H0:B/B", "H:A,H0:B/A"]
    ending = environment.step("assumption.")
    assert ending == Outcome("", 1.0, "terminated", "proved", {"progress": pytest.approx(0.2)})


@needs_coq
def test_a_proof_by_induction_shows_its_hypothesis(live):
    environment, prompt = live(BY_INDUCTION)
    assert prompt == "forall n: nat,n+0=n?"
    seen = [environment.step(tactic).observation for tactic in BY_INDUCTION.script[:4]]
    assert seen == ["/0+0=0", "IHn:n+0=n/S'n+0=S'n", "IHn:n+0=n/S(n+0)=S'n", "IHn:n+0=n/S'n=S'n"]
    assert environment.step("reflexivity.").reward == 1.0


@needs_coq
def test_a_refused_tactic_costs_a_turn_and_changes_nothing(live):
    environment, _ = live(COMMUTES)
    for tactic in ("left.", "destruct H.", "assumption.", "apply addzero.", "intros"):
        assert environment.step(tactic) == Outcome("!", parts={"progress": 0.0})
    assert environment.step("intros.").observation == "H:A&B/B&A"
    assert [environment.step("assumption.").observation for _ in range(2)] == ["!", "!"]


CHEATS = [
    *("Admitted.", "admit.", "Abort.", "Qed.", "Defined.", "Restart.", "Undo.", "Axiom a:False.", "Unset Silent."),
    *(
        "Set Printing All.",
        "Show.",
        "Quit.",
        "Drop.",
        "Redirect f.",
        "give_up.",
        "shelve.",
        "Proof.",
        "Focus.",
        "auto.",
    ),
    *("intros. Admitted.", "intros.Admitted.", "intros; admit.", "intros.\nAdmitted.", "split. admit. admit."),
    *("exact (ltac:(admit)).", "intros (*.*).", "all:admit.", "1:intros.", "{ intros.", "- intros.", "try intros."),
    *(
        "introsx.",
        " intros.",
        "intros..",
        "intros. ",
        "intros",
        "",
        ".",
        "apply é.",
        "exact 123.",
        "intros " + "A " * 99 + ".",
    ),
    *("exact (proof_admitted).", "intros | idtac.", "Timeout 1 intros.", "fail.", "abstract intros.", "intros \\/."),
    *("rewrite H by admit.", "rewrite H by shelve.", "rewrite <- H by(tauto)."),
]


@pytest.mark.parametrize("action", CHEATS)
def test_what_is_not_one_plain_tactic_never_reaches_coqtop(action):
    assert not is_tactic(action)


@pytest.mark.parametrize(
    "tactic", ["intros.", "destruct H0.", "rewrite <- IHn.", "apply H in H0.", "exact (H H0).", "induction n."]
)
def test_plain_tactics_do(tactic):
    assert is_tactic(tactic)


@hypothesis.given(st.text(max_size=30) | st.text("intros Admitd.;:H()\n", max_size=20))
def test_a_tactic_is_one_sentence(text):
    if is_tactic(text):
        assert text.index(".") == len(text) - 1
        assert not set(text) & set(";:*|{}[]\n\"'_")


@needs_coq
def test_a_theorem_that_rests_on_an_axiom_is_not_closed():
    coqtop = Coqtop("True")
    try:
        coqtop._say("Abort.")
        assert coqtop._say("Axiom wrong : False.") is not None
        assert coqtop._say("Theorem goal : 1 = 2.") is not None
        assert coqtop.tactic("contradiction wrong.") == ""
        assert not coqtop.closed()
    finally:
        coqtop.close()


@needs_coq
def test_an_unfinished_proof_is_not_closed():
    coqtop = Coqtop("True /\\ True")
    try:
        assert coqtop.tactic("split.")
        assert not coqtop.closed()
    finally:
        coqtop.close()


@needs_coq
@pytest.mark.parametrize(("statement", "script"), LOGIC + ARITHMETIC)
def test_the_script_of_every_theorem_proves_it_and_assumption_alone_does_not_help(statement, script, live):
    problem = instantiated(statement, script, random.Random(0))
    environment, prompt = live(problem, level=2)
    Coq.tokenizer.encode(prompt)
    for tactic in problem.script:
        if tactic.split()[0] in ("destruct", "apply", "rewrite"):
            assert environment.step("assumption.").observation == "!"
            break
    environment, _ = live(problem, level=2)
    for tactic in problem.script:
        outcome = environment.step(tactic)
        Coq.tokenizer.encode(outcome.observation)
    assert outcome.reward == 1.0
    assert 2 <= len(problem.script) <= 11


@needs_coq
@pytest.mark.parametrize("level", [1, 2])
def test_demonstrations_fit_the_budget_and_prove_unless_confused(level):
    for noise, expected in ((0, 1.0), (1, 0.0)):
        family = Coq(level=level, noise=noise)
        for index in range(3):
            turns = demonstration(family, "train", index, random.Random(index))
            assert sum(len(family.tokenizer.encode(text)) for text, _ in turns) <= family.max_tokens
            script = family.instance("train", index).problem.script
            has_trap = any(t.split()[0] in ("destruct", "apply", "rewrite") for t in script)
            assert turns[-1][1] == (expected == 1.0 or not has_trap)


@needs_coq
def test_an_attempt_is_restored_by_its_actions(live):
    environment, _ = live(COMMUTES)
    actions = ["intros.", "left.", "Admitted.", "split.", "destruct H."]
    outcomes = [environment.step(action) for action in actions]
    restored = Coq().environment()
    restored.restore(Instance("coq", "train", 0, COMMUTES), actions[:3])
    assert [restored.step(a) for a in actions[3:]] == outcomes[3:]
    restored._coqtop.close()
    assert Coq().respond(COMMUTES, actions) == outcomes[-1]


@needs_coq
def test_the_turn_limit_ends_an_attempt(live):
    environment, _ = live(COMMUTES)
    outcomes = [environment.step("left.") for _ in range(8)]
    assert [o.end for o in outcomes] == [None] * 7 + ["terminated"]
    assert outcomes[-1].reason == TURN_LIMIT


@needs_coq
def test_a_dead_coqtop_is_a_failure_of_the_environment(live):
    environment, _ = live(COMMUTES)
    os.kill(environment._coqtop._process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"coqtop (died|is gone)"):
        environment.step("intros.")


@needs_coq
def test_a_hung_coqtop_is_killed_and_reported(live, monkeypatch):
    monkeypatch.setattr(coq, "_STEP_S", 0.3)
    environment, _ = live(COMMUTES)
    process = environment._coqtop._process
    os.kill(process.pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"coqtop hangs: no answer in 0\.3 s"):
        environment.step("intros.")
    assert time.monotonic() - start < 10
    assert process.poll() is not None


@needs_coq
def test_the_process_ends_with_its_attempt():
    environment = Coq().environment()
    environment.reset(Instance("coq", "train", 0, COMMUTES))
    process = environment._coqtop._process
    assert process.poll() is None
    del environment
    assert process.poll() is not None


@needs_coq
@pytest.mark.slow
def test_a_proof_of_two_thousand_tactics():
    family = Coq(level=7, noise=0)
    turns = demonstration(family, "train", 0, random.Random(0))
    assert len([1 for _, is_action in turns if is_action]) > 2000
    assert turns[-1][1]
    assert sum(len(family.tokenizer.encode(text)) for text, _ in turns) <= family.max_tokens


def test_text_of_coq_is_shown_in_few_symbols():
    assert joined(entries("S (n + 0) = S n", 24)) == "S(n+0)=S'n"
    assert entries("A \\/ (B -> False)", 24) == ["A", "|", "(", "B", ">", "False", ")"]
    assert entries("A /\\ B /\\ C", 3) == ["A", "&", "B", "~"]
    assert entries("unknown...", 9) == ["_", "~"]


@needs_coq
@pytest.mark.parametrize("level", [1, 2])
def test_splits_are_disjoint_whatever_letters_and_numbers(level):
    family = Coq(level=level)
    train, test = (
        {tuple(family.split_key(family.instance(split, i).problem)) for i in range(200)} for split in ("train", "test")
    )
    assert train
    assert test
    assert not train & test


@needs_coq
def test_a_theorem_s_key_is_the_same_for_other_letters_numbers_and_places():
    family = Coq()

    def key(statement):
        return family.split_key(Problem(statement, ()))

    one, other = "forall A B : Prop, A -> B -> A", "forall n : nat, n + 2 = 2 + n"
    assert key(f"({one}) /\\ ({other})") == ["A -> B -> A", "n + # = # + n"]
    assert key(f"({other.replace('2', '3')}) /\\ (forall C F : Prop, F -> C -> F)") == key(f"({one}) /\\ ({other})")
    assert key("forall A B : Prop, A -> B -> B") != key(one)


def test_without_coqtop_the_task_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        ValueError, match="needs the program coqtop; on Debian: apt-get install --no-install-recommends"
    ):
        Coq()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(level=8), "level is 8"),
        (dict(steps=2), "steps is 2"),
        (dict(steps=9, level=3), "level has no effect"),
        (dict(noise=-1), "noise is -1"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Coq(**options)
