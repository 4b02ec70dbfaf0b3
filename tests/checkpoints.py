"""Finds loops of coroutines that can repeat without a checkpoint.

The rule: if a `while` loop in an `async def` awaits anything, every path through its body that
leads to another iteration has a checkpoint. A checkpoint is an await of a call of trio (`CALLS`) or
of its lock, of the event loop's `pause`, a bare `yield` to it, or an await of a function of this
tree that has a checkpoint on each of its own paths. A `try` body may be left anywhere, so `except:
continue` needs its own. Functions that count turns (`TURNS`) cause a pause after a bounded number
of iterations.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

_text = cache(ast.unparse)

# Methods and functions of trio that are checkpoints, whether they wait or not.
CALLS = frozenset(
    (
        "sleep", "sleep_until", "sleep_forever", "checkpoint", "cancel_shielded_checkpoint",
        "wait_readable", "wait_writable", "wait_task_rescheduled", "wait", "acquire",
        "run_sync", "receive_some", "send_all", "accept", "receive", "send", "recvmsg", "start",
    )
)  # fmt: skip
TURNS = frozenset(("must_wait_for", "count_read"))
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
QUIET, LOUD = False, True  # a path without a checkpoint, and one with


@dataclass(frozen=True)
class Paths:
    """The ways to leave a piece of code; each value is whether a checkpoint has been passed."""

    on: frozenset[bool] = frozenset()  # to the next statement
    again: frozenset[bool] = frozenset()  # by `continue`
    out: frozenset[bool] = frozenset()  # by `break`
    back: frozenset[bool] = frozenset()  # by `return`

    def __or__(self, other: Paths) -> Paths:
        return Paths(
            self.on | other.on,
            self.again | other.again,
            self.out | other.out,
            self.back | other.back,
        )


Owner = tuple[str, str]  # a module, and a class in it or "" for the top level


@dataclass
class Tree:
    """All functions that can be awaited. `sure`: those with a checkpoint on each path."""

    functions: dict[str, list[FUNCTIONS]] = field(default_factory=dict)
    owned: dict[tuple[Owner, str], FUNCTIONS] = field(default_factory=dict)
    owners: dict[ast.AST, Owner] = field(default_factory=dict)
    imported: dict[str, dict[str, str]] = field(default_factory=dict)  # by module and name
    sure: set[FUNCTIONS] = field(default_factory=set)
    bases: dict[Owner, list[str]] = field(default_factory=dict)  # of a class, as in the source
    attributes: dict[Owner, dict[str, str]] = field(default_factory=dict)  # annotated in __init__
    here: Owner = ("", "")  # the owner of the code in question
    parameters: dict[str, str] = field(default_factory=dict)  # of the function, with annotations
    all_parameters: dict[FUNCTIONS, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, modules: Mapping[str, ast.AST]) -> Tree:
        tree = cls()
        for name, module in modules.items():
            tree._enter(module, (name, ""))
        grown = True
        while grown:
            grown = False
            for function in (f for named in tree.functions.values() for f in named):
                if function not in tree.sure and tree.always(function):
                    tree.sure.add(function)
                    grown = True
        return tree

    def _enter(self, node: ast.AST, owner: Owner) -> None:
        for child in _statements(node):
            within = owner
            if isinstance(child, ast.ImportFrom) and child.module:
                names = self.imported.setdefault(owner[0], {})
                names |= {alias.asname or alias.name: child.module for alias in child.names}
            elif isinstance(child, ast.ClassDef):
                within = (owner[0], child.name)
                self.bases[within] = [_text(base) for base in child.bases]
            elif isinstance(child, FUNCTIONS):
                self.owners[child] = owner
                if child.name == "__init__":
                    self.attributes[owner] = _attributes(child)
                if _may_be_awaited(child):
                    self.functions.setdefault(child.name, []).append(child)
                    self.owned[owner, child.name] = child
            self._enter(child, within)

    def candidates(self, call: ast.Call) -> list[FUNCTIONS]:
        """The functions that a call can mean: the known one, or else all with its name."""
        called, (module, _) = call.func, self.here
        function = None
        if isinstance(called, ast.Name):
            owner = (self.imported.get(module, {}).get(called.id, module), "")
            function = self.owned.get((owner, _name(call)))
        elif isinstance(called, ast.Attribute):
            target = _text(called.value)
            if target == "self":
                function = self.method(self.here, _name(call))
            else:
                kinds = self.attributes.get(self.here, {}) | self.parameters
                kind = kinds.get(target.removeprefix("self."), "")
                function = self.method(self.class_named(kind, module), _name(call))
        return [function] if function is not None else self.functions.get(_name(call), [])

    def class_named(self, name: str, module: str) -> Owner:
        return (self.imported.get(module, {}).get(name, module), name)

    def method(self, owner: Owner, name: str) -> FUNCTIONS | None:
        """The method of a class, or of the first base that has it."""
        function = self.owned.get((owner, name))
        for base in self.bases.get(owner, ()):
            function = function or self.method(self.class_named(base, owner[0]), name)
        return function

    def enter(self, function: FUNCTIONS) -> None:
        """Makes this function the one whose calls are looked up."""
        self.here = self.owners[function]
        if function not in self.all_parameters:
            self.all_parameters[function] = parameters = _annotations(function)
            known = self.attributes.get(self.here, {})
            for name, value in _assigned(function):
                if value.removeprefix("self.") in known and value.startswith("self."):
                    parameters[name] = known[value.removeprefix("self.")]
        self.parameters = self.all_parameters[function]

    def always(self, function: FUNCTIONS) -> bool:
        self.enter(function)
        paths = self.block(function.body)
        return (paths.on | paths.back) == {LOUD}

    def quiet_loops(self, module: ast.AST) -> Iterator[tuple[str, ast.While]]:
        """The loops that break the rule, with the names of their functions."""
        for function in _functions(module):
            loops = [node for node in _own(function) if isinstance(node, ast.While)]
            loops = [node for node in loops if _awaits(node)]
            if loops:
                self.enter(function)
            for node in loops:
                if self.may_spin(node):
                    yield function.name, node

    def may_spin(self, loop: ast.While) -> bool:
        if _is_loud(self, loop.test):
            return False
        body = self.block(loop.body)
        return QUIET in body.on | body.again

    def block(self, statements: Iterable[ast.stmt]) -> Paths:
        """The paths of statements that begin without a checkpoint."""
        paths = Paths(on=frozenset((QUIET,)))
        for statement in statements:
            ways = self.statement(statement)
            following = frozenset()
            for before in paths.on:
                after = _raised(ways) if before else ways
                following |= after.on
                paths |= Paths(again=after.again, out=after.out, back=after.back)
            paths = Paths(following, paths.again, paths.out, paths.back)
        return paths

    def statement(self, node: ast.stmt) -> Paths:
        match node:
            case ast.Return():
                return Paths(back=frozenset((_is_loud(self, node.value),)))
            case ast.Raise():
                return Paths()
            case ast.Continue():
                return Paths(again=frozenset((QUIET,)))
            case ast.Break():
                return Paths(out=frozenset((QUIET,)))
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return Paths(on=frozenset((QUIET,)))
        compound = self._compound(node)
        return compound or Paths(on=frozenset((_is_loud(self, node),)))

    def _compound(self, node: ast.stmt) -> Paths | None:
        match node:
            case ast.If():
                return self._if(node)
            case ast.While():
                return self._while(node)
            case ast.For() | ast.AsyncFor():
                return self._for(node)
            case ast.With() | ast.AsyncWith():
                return self._with(node)
            case ast.Try() | ast.TryStar():
                return self._try(node)
            case ast.Match():
                return self._match(node)
        return None

    def _if(self, node: ast.If) -> Paths:
        if _counts_turns(node.test):
            return Paths(on=frozenset((self._pauses(node.body),)))
        both = self.block(node.body) | self.block(node.orelse)
        return _raised(both) if _is_loud(self, node.test) else both

    def _for(self, node: ast.For | ast.AsyncFor) -> Paths:
        body = self.block(node.body)
        if _has_iterations(node.iter):
            return Paths(on=body.on | body.again | body.out, back=body.back)
        skipped = self.block(node.orelse)
        return Paths(on=frozenset((QUIET,)) | body.out, back=body.back) | skipped

    def _match(self, node: ast.Match) -> Paths:
        paths = Paths(on=frozenset((QUIET,)))
        for case in node.cases:
            paths |= self.block(case.body)
        return _raised(paths) if _is_loud(self, node.subject) else paths

    def _pauses(self, body: list[ast.stmt]) -> bool:
        return self.block(body).on <= {LOUD}

    def _while(self, node: ast.While) -> Paths:
        body = self.block(node.body)
        forever = isinstance(node.test, ast.Constant) and bool(node.test.value)
        iterations = body.on | body.again
        ended = frozenset() if forever else frozenset((QUIET,)) | iterations
        # A loud iteration makes everything after it loud, but the first can be the last.
        paths = Paths(on=ended | body.out, back=body.back)
        return _raised(paths) if _is_loud(self, node.test) else paths

    def _with(self, node: ast.With | ast.AsyncWith) -> Paths:
        body = self.block(node.body)
        calls = [item.context_expr for item in node.items]
        loud = any(_is_loud(self, call) for call in calls)
        if isinstance(node, ast.AsyncWith):
            loud = loud or any(_name(call) == "open_nursery" or _is_lock(call) for call in calls)
        if any(_name(call) == "suppress" for call in calls):
            body |= Paths(on=frozenset((QUIET,)))
        elif any(_name(call) in ("move_on_after", "move_on_at", "CancelScope") for call in calls):
            body |= Paths(on=frozenset((LOUD,)))  # cancelled, which happens only at checkpoints
        return _raised(body) if loud else body

    def _try(self, node: ast.Try | ast.TryStar) -> Paths:
        body = self.block([*node.body, *node.orelse])
        # An exception of a pause comes from the event loop, so there was a checkpoint.
        paused = [_text(statement) for statement in node.body] == ["await pause"]
        for handler in node.handlers:
            handled = self.block(handler.body)
            body |= _raised(handled) if paused else handled
        last = self.block(node.finalbody)
        if node.finalbody and last.on <= {LOUD}:
            body = _raised(body)
        return body | Paths(again=last.again, out=last.out, back=last.back)


def _annotations(function: FUNCTIONS) -> dict[str, str]:
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {arg.arg: _text(arg.annotation) for arg in named if arg.annotation is not None}


def _assigned(function: FUNCTIONS) -> Iterator[tuple[str, str]]:
    """Names and the values assigned to them: `a = b`, and `a, b = c, d`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from (
                    (_text(name), _text(part))
                    for name, part in zip(target.elts, value.elts, strict=False)
                )
            else:
                yield _text(target), _text(value)


def _attributes(init: FUNCTIONS) -> dict[str, str]:
    """Attributes that are set to an annotated parameter."""
    known = _annotations(init)
    return {
        target.attr: known[node.value.id]
        for node in ast.walk(init)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Name)
        and node.value.id in known
        for target in node.targets
        if isinstance(target, ast.Attribute) and _text(target.value) == "self"
    }


def _raised(paths: Paths) -> Paths:
    """The same paths, if they begin after a checkpoint."""
    return Paths(
        *(frozenset((LOUD,)) if values else values
          for values in (paths.on, paths.again, paths.out, paths.back))
    )  # fmt: skip


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements directly in a node, and its handlers and cases, which have statements."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        yield from getattr(node, name, ())


def _functions(node: ast.AST) -> Iterator[FUNCTIONS]:
    for child in _statements(node):
        if isinstance(child, FUNCTIONS):
            yield child
        yield from _functions(child)


@cache
def _own(function: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes of a function without those of functions in it."""
    nodes, waiting = [], list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        if not isinstance(node, SCOPES):
            waiting += ast.iter_child_nodes(node)
    return tuple(nodes)


def _awaits(loop: ast.While) -> bool:
    kinds = ast.Await | ast.AsyncFor | ast.AsyncWith
    return any(isinstance(node, kinds) for node in _own(loop))


def _is_loud(tree: Tree, node: ast.AST | None) -> bool:
    """Whether the evaluation certainly passes a checkpoint."""
    if node is None or not _may_pause(node):
        return False
    match node:
        case ast.Lambda() | ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
            return False
        case ast.DictComp():
            return False
        case ast.BoolOp():
            return _is_loud(tree, node.values[0])
        case ast.IfExp():
            both = _is_loud(tree, node.body) and _is_loud(tree, node.orelse)
            return both or _is_loud(tree, node.test)
        case ast.Await():
            return _is_checkpoint(tree, node.value) or _is_loud(tree, node.value)
        case ast.Yield():
            return node.value is None or _is_checkpoint(tree, node.value)
    return any(_is_loud(tree, child) for child in ast.iter_child_nodes(node))


@cache
def _may_pause(node: ast.AST) -> bool:
    if isinstance(node, ast.Await | ast.Yield):
        return True
    return any(map(_may_pause, ast.iter_child_nodes(node)))


def _is_checkpoint(tree: Tree, awaited: ast.expr) -> bool:
    if isinstance(awaited, ast.Name):
        return awaited.id == "pause"
    name = _name(awaited)
    if name in CALLS and _text(awaited).startswith("trio."):
        return True
    if name in ("await_direct", "nested") and isinstance(awaited, ast.Call):
        return _is_checkpoint(tree, awaited.args[0])
    if not isinstance(awaited, ast.Call):
        return False
    functions = tree.candidates(awaited)
    if functions:
        return all(function in tree.sure for function in functions)
    return name in CALLS


def _has_iterations(iterated: ast.expr) -> bool:
    """Whether this is `range` of a constant, which is never zero here."""
    if _name(iterated) != "range" or not isinstance(iterated, ast.Call):
        return False
    (bound,) = iterated.args[:1]
    return isinstance(bound, ast.Name) and bound.id.isupper()


def _may_be_awaited(function: FUNCTIONS) -> bool:
    if isinstance(function, ast.AsyncFunctionDef):
        return True
    return any(isinstance(node, ast.Yield | ast.YieldFrom) for node in _own(function))


def _counts_turns(test: ast.expr) -> bool:
    return any(_name(node) in TURNS for node in ast.walk(test) if isinstance(node, ast.Call))


def _name(call: ast.expr) -> str:
    """The name of the called function after the last dot; "" if this is not a call."""
    if not isinstance(call, ast.Call):
        return ""
    called = call.func
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _is_lock(expression: ast.expr) -> bool:
    named = (
        expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")
    )
    return named.strip("_") in (
        "lock",
        "operation_lock",
        "limiter",
        "turn",
        "room",
        "slots",
        "making",
    )
