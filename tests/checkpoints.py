"""Which loops of a coroutine may go round without giving anybody else a turn.

The rule: on every path through the body of a `while` loop in an `async def` that leads to another
round there is a checkpoint, if the loop awaits anything at all. A checkpoint is an await of a call
of trio (`CALLS`) or of its lock, of the event loop's `pause`, a bare `yield` to it, or an await of
a function of this tree that has one on each of its own paths. A `try` body may be left anywhere, so
`except: continue` needs its own. A turn that is counted (`TURNS`) comes after a bounded number of
rounds at the latest.
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
    """How a piece of code may be left; each value says whether a checkpoint has been passed."""

    on: frozenset[bool] = frozenset()  # to what follows
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


Owner = tuple[str, str]  # a module and a class of it; "" at the module's top


@dataclass
class Tree:
    """All functions that can be awaited; `sure`: those that have a checkpoint on each path."""

    functions: dict[str, list[FUNCTIONS]] = field(default_factory=dict)
    owned: dict[tuple[Owner, str], FUNCTIONS] = field(default_factory=dict)
    owners: dict[ast.AST, Owner] = field(default_factory=dict)
    imported: dict[str, dict[str, str]] = field(default_factory=dict)  # by module and name
    sure: set[FUNCTIONS] = field(default_factory=set)
    bases: dict[Owner, list[str]] = field(default_factory=dict)  # of a class, as they are written
    attributes: dict[Owner, dict[str, str]] = field(default_factory=dict)  # annotated by __init__
    here: Owner = ("", "")  # whose code is looked at
    parameters: dict[str, str] = field(default_factory=dict)  # of the function: their annotations
    all_parameters: dict[FUNCTIONS, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, modules: Mapping[str, ast.AST]) -> Tree:
        tree = cls()
        for name, module in modules.items():
            tree._enter(module, (name, ""))
        grown = True
        while grown:
            grown = False
            for function in (f for found in tree.functions.values() for f in found):
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

    def meant(self, call: ast.Call) -> list[FUNCTIONS]:
        """What may be called here: of `self` and of a bare name that is known, else of the name."""
        called, (module, _) = call.func, self.here
        one = None
        if isinstance(called, ast.Name):
            owner = (self.imported.get(module, {}).get(called.id, module), "")
            one = self.owned.get((owner, _name(call)))
        elif isinstance(called, ast.Attribute):
            target = _text(called.value)
            if target == "self":
                one = self.method(self.here, _name(call))
            else:
                known = self.attributes.get(self.here, {}) | self.parameters
                kind = known.get(target.removeprefix("self."), "")
                one = self.method(self.class_named(kind, module), _name(call))
        return [one] if one is not None else self.functions.get(_name(call), [])

    def class_named(self, name: str, module: str) -> Owner:
        return (self.imported.get(module, {}).get(name, module), name)

    def method(self, owner: Owner, name: str) -> FUNCTIONS | None:
        """The method of a class, or of the first base that has it."""
        one = self.owned.get((owner, name))
        for base in self.bases.get(owner, ()):
            one = one or self.method(self.class_named(base, owner[0]), name)
        return one

    def enter(self, function: FUNCTIONS) -> None:
        """From now on calls are those of this function."""
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
        """Loops that break the rule, with the name of their function."""
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
        """Begun without a checkpoint."""
        found = Paths(on=frozenset((QUIET,)))
        for statement in statements:
            here = self.statement(statement)
            on = frozenset()
            for before in found.on:
                after = _raised(here) if before else here
                on |= after.on
                found |= Paths(again=after.again, out=after.out, back=after.back)
            found = Paths(on, found.again, found.out, found.back)
        return found

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
        if _has_rounds(node.iter):
            return Paths(on=body.on | body.again | body.out, back=body.back)
        skipped = self.block(node.orelse)
        return Paths(on=frozenset((QUIET,)) | body.out, back=body.back) | skipped

    def _match(self, node: ast.Match) -> Paths:
        found = Paths(on=frozenset((QUIET,)))
        for case in node.cases:
            found |= self.block(case.body)
        return _raised(found) if _is_loud(self, node.subject) else found

    def _pauses(self, body: list[ast.stmt]) -> bool:
        return self.block(body).on <= {LOUD}

    def _while(self, node: ast.While) -> Paths:
        body = self.block(node.body)
        forever = isinstance(node.test, ast.Constant) and bool(node.test.value)
        rounds = body.on | body.again
        ended = frozenset() if forever else frozenset((QUIET,)) | rounds
        # A round that was loud makes all loud that comes behind it; the first may be the last.
        found = Paths(on=ended | body.out, back=body.back)
        return _raised(found) if _is_loud(self, node.test) else found

    def _with(self, node: ast.With | ast.AsyncWith) -> Paths:
        body = self.block(node.body)
        calls = [item.context_expr for item in node.items]
        loud = any(_is_loud(self, call) for call in calls)
        if isinstance(node, ast.AsyncWith):
            loud = loud or any(_name(call) == "open_nursery" or _is_lock(call) for call in calls)
        if any(_name(call) == "suppress" for call in calls):
            body |= Paths(on=frozenset((QUIET,)))
        elif any(_name(call) in ("move_on_after", "move_on_at", "CancelScope") for call in calls):
            body |= Paths(on=frozenset((LOUD,)))  # cancelled: that happens at checkpoints only
        return _raised(body) if loud else body

    def _try(self, node: ast.Try | ast.TryStar) -> Paths:
        body = self.block([*node.body, *node.orelse])
        # What is raised in a pause comes from the event loop, so there was one.
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
    """Names and what they are set to: `a = b`, and `a, b = c, d`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                yield from (
                    (_text(one), _text(other))
                    for one, other in zip(target.elts, value.elts, strict=False)
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
    """The same paths, all begun behind a checkpoint."""
    return Paths(
        *(frozenset((LOUD,)) if each else each
          for each in (paths.on, paths.again, paths.out, paths.back))
    )  # fmt: skip


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Those directly in a statement, and its handlers and cases: the nodes that have some, too."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        yield from getattr(node, name, ())


def _functions(node: ast.AST) -> Iterator[FUNCTIONS]:
    for child in _statements(node):
        if isinstance(child, FUNCTIONS):
            yield child
        yield from _functions(child)


@cache
def _own(function: ast.AST) -> tuple[ast.AST, ...]:
    """What stands in it, and not in a function inside it."""
    found, waiting = [], list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, SCOPES):
            waiting += ast.iter_child_nodes(node)
    return tuple(found)


def _awaits(loop: ast.While) -> bool:
    kinds = ast.Await | ast.AsyncFor | ast.AsyncWith
    return any(isinstance(node, kinds) for node in _own(loop))


def _is_loud(tree: Tree, node: ast.AST | None) -> bool:
    """Whether its evaluation passes a checkpoint for certain."""
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
    ours = tree.meant(awaited)
    if ours:
        return all(function in tree.sure for function in ours)
    return name in CALLS


def _has_rounds(iterated: ast.expr) -> bool:
    """`range` of a constant, which is not nought here."""
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
    """Of what is called, without what stands before its last dot; "" where nothing is called."""
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
