import pytest

from sao_jax.envs import registry
from sao_jax.envs.arithmetic import Arithmetic
from sao_jax.envs.calculator import Calculator


def test_a_name_gives_the_family_with_its_defaults():
    family = registry.make_family("calculator")
    assert isinstance(family, Calculator)
    assert family.max_tokens == 64
    # Other tests register families of their own in the same process.
    tasks = {
        "arithmetic",
        "calculator",
        "contest",
        "coq",
        "dialogue",
        "grid",
        "long-repair",
        "mathword",
        "proof",
        "repair",
    }
    assert {name for name in registry.names() if not name.endswith("tiny")} == tasks


def test_options_are_parsed_as_numbers_booleans_or_text():
    family = registry.make_family("calculator:level=3,noise=0.25")
    assert (family.max_tokens, family.noise) == (112, 0.25)
    family = registry.make_family("arithmetic:kind=reverse,partial=true")
    assert isinstance(family, Arithmetic)
    assert (family.kind, family.partial) == ("reverse", True)
    assert registry.parse_options("a=1, b=x,c=False,d=1e-3,e='1'") == {
        "a": 1,
        "b": "x",
        "c": False,
        "d": 1e-3,
        "e": "1",
    }


def test_a_class_from_a_module_or_a_file(tmp_path):
    family = registry.make_family("sao_jax.envs.arithmetic:Arithmetic:kind=max")
    assert family.kind == "max"
    path = tmp_path / "tasks.py"
    path.write_text("class Mine:\n    def __init__(self, size=3):\n        self.size = size\n")
    assert registry.make_family(f"{path}:Mine").size == 3
    assert registry.make_family(f"{path}:Mine:size=5").size == 5


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("contest:noise=nan", "noise is 'nan'; it must be a number"),
        ("repair:habit=", "habit is ''; it must be a number"),
        ("mathword:level=[1]", r"level is \[1\]; it must be a number"),
        ("mathword:level=true", "level is True; it must be a number"),
        ("arithmetic:partial=1", "partial is 1; it must be true or false"),
        ("contest:skip=1e999", "skip is inf; it is a share"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_one_line(spec, says):
    with pytest.raises(ValueError, match=says):
        registry.make_family(spec)


def test_registering_twice_is_refused(monkeypatch):
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    registry.register("mine", Calculator)
    assert isinstance(registry.make_family("mine:level=1"), Calculator)
    with pytest.raises(ValueError, match="'mine' is already registered"):
        registry.register("mine", Calculator)
    with pytest.raises(ValueError, match="allowed: letters"):
        registry.register("a:b", Calculator)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("calculater", "unknown task 'calculater'; allowed: arithmetic, calculator"),
        ("calculator:levle=2", "no option 'levle'; allowed: level, max_number, noise, skip, habit"),
        ("calculator:level", "'level' is not of the form option=value"),
        ("calculator:level=1,level=2", "given twice"),
        ("calculator:level=9", "level is 9"),
        ("no_such_module:Task", "cannot import 'no_such_module'"),
        ("no_such_file.py:Task", "no task file"),
        ("sao_jax.envs.arithmetic:Missing", "has no class 'Missing'"),
        ("", "unknown task ''"),
    ],
)
def test_what_cannot_be_made_is_explained(spec, message):
    with pytest.raises(ValueError, match=message):
        registry.make_family(spec)
