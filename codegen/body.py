"""The statements of a function: source comments, a `del` after each last use, and loops where calls repeat.

    for i in range(32):
        # layers.0 … layers.31
        x, saved[i + 1] = layers_forward(rt, i + 1, rt.params[f'layers.{i}.up.weight'], x)

Run, the loops do what the lines do one after another, with the same values alive after each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from autopar.codegen.marks import fill, shape
from autopar.codegen.repeats import Progression, Run, Variable, progressions, runs
from autopar.codegen.storage import Lives, death_rounds, places, store
from autopar.codegen.text import comment
from autopar.ir.lines import FetchSaved, Function, Line, Prefetch, TemplateCall

_AHEAD = (Prefetch, FetchSaved)
_INDENT = "    "
_MOST_NAMES = 2
"""The number of entries of a dict up to which each is named in a list of its own."""


class Body:
    """A function's lines as marked text, with what repeats in them and how its names are written.

    text_of: prints a line with marks. returned: names that outlive the lines. reserved: names that stand for something
    else in the function.
    """

    def __init__(
        self,
        function: Function,
        text_of: Callable[[Line], str],
        returned: Collection[str],
        reserved: Collection[str] = (),
    ) -> None:
        self.lines = function.lines
        self.texts = [text_of(line) for line in self.lines]
        self.shapes = [shape(text) for text in self.texts]
        self.lives = Lives.of(function, returned)
        calls = [isinstance(line, TemplateCall) for line in self.lines]
        repeats = runs(self.shapes, lambda run: any(calls[run.start : run.start + run.period]), self._rank)
        self.runs, self.storage = store(self.lives, repeats, reserved)
        names = {*reserved, *self.lives.last, *self.storage.plain.values(), *self.storage.bases}
        self.index = next(
            name for name in ("i", "j", "k", *(f"i_{n}" for n in range(len(names) + 1))) if name not in names
        )

    def _rank(self, i: int) -> int:
        """How well a round begins at a line: best where the work for a call does, which starts what is for the next one."""
        if i and isinstance(self.lines[i], _AHEAD) and not isinstance(self.lines[i - 1], _AHEAD):
            return 0
        return 1 if i and self.lines[i].source not in ("", self.lines[i - 1].source) else 2

    def statements(self) -> Iterator[str]:
        """The function's lines, and the loops among them."""
        loops = {run.start: run for run in self.runs}
        source, i = "", 0
        while i < len(self.lines):
            if i in loops:
                yield from self._loop(loops[i])
                source, i = "", loops[i].end
                continue
            line = self.lines[i]
            if line.source and line.source != source:
                source = line.source
                yield f"# {comment(source, 110)}"
            yield from fill(self.texts[i], self.storage.written)
            written = {name: self.storage.written(name) for name in self.lives.names[i]}
            yield from _deleted([n for n in self._overwritten_aside(i, written) if self.lives.last[n] == i], written)
            i += 1

    def _loop(self, run: Run) -> Iterator[str]:
        variable = self._variable(run)
        yield f"{variable.header}:"
        source = ""
        after: list[str] = []
        for place in range(run.period):
            rounds = run.rounds(place)
            first, last = self.lines[rounds[0]].source, self.lines[rounds[-1]].source
            said = first if first == last else f"{first} … {last}"
            if first and said != source:
                source = said
                yield f"{_INDENT}# {comment(source, 220)}"
            names_here = {names[0]: names for names in places(run, self.lives, place)}
            written = {first: self._written(names, variable) for first, names in names_here.items()}
            numbers = variable.expressions(self.shapes[rounds[0]], self.shapes[rounds[1]])
            yield from (_INDENT + text for text in fill(self.texts[rounds[0]], written.__getitem__, numbers))
            deaths: dict[str, list[str]] = {}
            for name in self._overwritten_aside(rounds[0], written):
                deaths.setdefault(death_rounds(run, self.lives, place, names_here[name]) or "", []).append(name)
            deaths.pop("", None)
            yield from (_INDENT + text for text in _deleted(deaths.pop("all", []), written))
            if place == run.period - 1 and not any("[" in written[name] for name in deaths.get("== last", [])):
                after = deaths.pop("== last", [])
            for when, names in deaths.items():
                relation, which = when.split()
                yield f"{_INDENT}if {variable.name} {relation} {variable.value(-1 if which == 'last' else 0)}:"
                yield from (2 * _INDENT + text for text in _deleted(names, written))
        yield from _deleted(after, written)

    def _variable(self, run: Run) -> Variable:
        numbers: list[Progression] = []
        for place in range(run.period):
            first, second, *_ = run.rounds(place)
            numbers += progressions(self.shapes[first], self.shapes[second])
            ways = (self.storage.together(names) for names in places(run, self.lives, place))
            numbers += [way[1] for way in ways if isinstance(way, tuple)]
        return Variable.choose(self.index, run.count, numbers)

    def _written(self, names: Sequence[str], variable: Variable) -> str:
        way = self.storage.together(names)
        assert way is not None
        return way if isinstance(way, str) else f"{way[0]}[{variable.expression(way[1]) or way[1].first}]"

    def _overwritten_aside(self, i: int, written: dict[str, str]) -> Iterator[str]:
        """The names at a line but those whose variable the line gives to what it makes."""
        outs = self.lines[i].outs
        made = {written[name] for name in outs if name != "_"}
        return (name for name in dict.fromkeys(self.lives.names[i]) if name in outs or written[name] not in made)

    # --- lists of names -------------------------------------------------------------------------------------------------

    def beginning(self, takes: Sequence[tuple[str, Sequence[str], bool]]) -> list[str]:
        """Names take their values out of lists; what holds them there is emptied, if the third says so."""
        lines: list[str] = []
        empty_dicts, begun = list(self.storage.bases), set[str]()
        for source, names, empty in takes:
            groups, start = self._groups(names), 0
            for entries, group in groups:
                part = source if len(groups) == 1 else f"{source}[{start}:{start + len(group)}]"
                if entries is None:
                    lines.append(
                        f"{', '.join(map(self.storage.written, group))}{',' if len(group) == 1 else ''} = {part}"
                    )
                    begun |= {self.storage.entries[name][0] for name in group if name in self.storage.entries}
                elif entries[0] in begun:
                    lines.append(f"{entries[0]}.update(zip({entries[1].range(len(group))}, {part}))")
                else:
                    lines.append(f"{entries[0]} = dict(zip({entries[1].range(len(group))}, {part}))")
                    begun.add(entries[0])
                    empty_dicts.remove(entries[0])
                start += len(group)
            if groups and empty:
                lines.append(f"{source}.clear()")
        return [*(f"{base} = {{}}" for base in empty_dicts), *lines]

    def listed(self, names: Sequence[str | None]) -> str:
        """A list of names (None: of nothing)."""
        parts: list[str] = []
        for entries, group in self._groups([name or "None" for name in names]):
            if entries is None:
                parts += map(self.storage.written, group)
                continue
            values = f"[{entries[0]}[{self.index}] for {self.index} in {entries[1].range(len(group))}]"
            if len(group) == len(names):
                return values
            parts.append(f"*{values}")
        return f"[{', '.join(parts)}]"

    def _groups(self, names: Sequence[str]) -> list[tuple[tuple[str, Progression] | None, list[str]]]:
        """Names in groups: entries of one dict whose keys have even steps, more than are named one by one; and others."""
        groups: list[tuple[tuple[str, Progression] | None, list[str]]] = []
        start = 0
        while start < len(names):
            end = start + 1
            while end < len(names) and self._entries(names[max(start, end - 2) : end + 1]):
                end += 1
            entries = self._entries(names[start:end]) if end - start > _MOST_NAMES else None
            if entries is not None:
                groups.append((entries, list(names[start:end])))
            elif groups and groups[-1][0] is None:
                groups[-1][1].extend(names[start:end])
            else:
                groups.append((None, list(names[start:end])))
            start = end
        return groups

    def _entries(self, names: Sequence[str]) -> tuple[str, Progression] | None:
        way = self.storage.together(names)
        return way if isinstance(way, tuple) and way[1].step else None


def _deleted(names: Sequence[str], written: dict[str, str]) -> list[str]:
    return [f"del {', '.join(written[name] for name in names)}"] if names else []
