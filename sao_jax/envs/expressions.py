"""Expressions of the tasks about code: read and evaluated here, nothing of them is given to Python.

Numbers, variables, `+ - *`, parentheses and calls. A tree is a variable's name, a number, (operator, left, right) or
(callee, arguments).
"""

from collections.abc import Callable, Container, Mapping
from typing import Any

from sao_jax.envs.calculator import apply

LIMIT = 9999  # largest magnitude of a value


def parse_expression(
    tokens: list[str], variables: Container[str], is_function: Callable[[str], bool], arity: int | None = None
) -> Any:
    """The tree that `tokens` are, or None if they are none. `arity`: the arguments of every call, if that is fixed."""
    tokens = [*tokens, "end"]
    reader = _Reader(tokens, variables, is_function, arity)
    try:
        tree = reader.sum()
    except ValueError:
        return None
    return tree if tokens == ["end"] else None


class _Reader:
    """Takes tokens from the front. Raises ValueError at one that does not belong there."""

    def __init__(self, tokens, variables, is_function, arity):
        self.tokens, self.variables, self.is_function, self.arity = tokens, variables, is_function, arity

    def take(self, expected: str) -> None:
        if self.tokens[0] != expected:
            raise ValueError
        self.tokens.pop(0)

    def sum(self) -> Any:
        tree = self.product()
        while self.tokens[0] in ("+", "-"):
            tree = (self.tokens.pop(0), tree, self.product())
        return tree

    def product(self) -> Any:
        tree = self.factor()
        while self.tokens[0] == "*":
            tree = (self.tokens.pop(0), tree, self.factor())
        return tree

    def factor(self) -> Any:
        token = self.tokens[0]
        if token == "end":
            raise ValueError
        self.tokens.pop(0)
        if token in self.variables:
            return token
        if token.isdigit():
            return int(token)
        if self.is_function(token):
            return token, self.arguments()
        if token != "(":
            raise ValueError
        tree = self.sum()
        self.take(")")
        return tree

    def arguments(self) -> tuple:
        self.take("(")
        found = [self.sum()]
        while self.tokens[0] == ",":
            self.tokens.pop(0)
            found.append(self.sum())
        self.take(")")
        if self.arity not in (None, len(found)):
            raise ValueError
        return tuple(found)


def evaluate(tree: Any, values: Mapping[str, int], call: Callable[[str, tuple[int, ...]], int]) -> int:
    """The value of a tree. Raises OverflowError at a number above LIMIT, KeyError at a variable without a value."""
    if isinstance(tree, str):
        return values[tree]
    if isinstance(tree, int):
        value = tree
    elif len(tree) == 2:
        value = call(tree[0], tuple(evaluate(argument, values, call) for argument in tree[1]))
    else:
        operator, left, right = tree
        value = apply(evaluate(left, values, call), operator, evaluate(right, values, call))
    if abs(value) > LIMIT:
        raise OverflowError
    return value
