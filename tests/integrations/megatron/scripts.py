"""Random shell scripts that start `torchrun`, and what bash passes to it."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from pathlib import Path

from pipeloom.integrations.megatron.shell.paths import ProgramWord, follow

ANY = "\x01any"
"""Stands for any number of arguments."""
PREAMBLE = """torchrun() { printf '%s\\0' "$#" "$@" >> "$REPORT"; }
mkdir() { :; }; pip() { :; }
"""
"""Functions in place of commands."""


def passed_by_bash(script: str, folder: Path, more: str = "") -> list[list[str]]:
    """Run a script with functions in place of commands, and return the arguments of each `torchrun`."""
    bash = shutil.which("bash")
    assert bash is not None, "bash is needed to check how scripts are read"
    report = folder / "report"
    report.write_bytes(b"")
    (folder / "script.sh").write_text(script)
    (folder / "env.sh").write_text(PREAMBLE + more)
    environment = {
        "PATH": os.environ["PATH"],
        "REPORT": str(report),
        "BASH_ENV": str(folder / "env.sh"),
        "LC_ALL": "C.UTF-8",
    }
    done = subprocess.run([bash, "script.sh"], cwd=folder, env=environment, capture_output=True, timeout=5, check=False)
    fields = report.read_bytes().decode().split("\0")[:-1]
    found = []
    while fields:
        count = int(fields[0])
        found.append(fields[1 : count + 1])
        fields = fields[count + 1 :]
    assert b"syntax error" not in done.stderr, (script, done.stderr)
    return found


def passed_by_us(script: str) -> list[list[list[str | None]]]:
    """For every way through a script, the arguments of each `torchrun`; None and `ANY` stand for unknown ones."""
    return [
        [[_text(word) for word in command.words[1:]] for command in path.started if command.words[0].text == "torchrun"]
        for path in follow("script.sh", script, lambda command: command.words[0].text == "torchrun")
    ]


_TEXTS = [
    r"$<T>",
    r'"$<T>"',
    r"${<T>}",
    r"x${<T>}y",
    r'"a  $<N>"',
    r"'$<T> #3'",
    r"plain",
    r"${<T>:-none}",
    r"${NOT_SET:-d}",
    r"${NOT_SET:-$NL}",
    r'${NOT_SET:-"a b"}',
    r"${NOT_SET:-a b}",
    r'"${NOT_SET:-a  b}"',
    r"${NOT_SET:-}",
    r"${<T>:+--flag}",
    r"${NOT_SET+--flag}",
    r"${<T>#*.}",
    r"${<T>##*.}",
    r"${<T>%.*}",
    r'"${<T>%%-*}"',
    r"${<T>/a/bb}",
    r"${<T>//[ab]/_}",
    r"${<T>/#s/S}",
    r"${<T>/%[0-9]/Z}",
    r'"${<T>// /}"',
    r"${<T>:1}",
    r"${<T>:0:2}",
    r"${<T>: -2}",
    r"${<T>:1:2}",
    r"${<T>^^}",
    r"${<T>^}",
    r"${<T>,,}",
    r"${#<T>}",
    r"$((<E>))",
    r'"$((<E>))"',
    r"$((<N>++))",
    r"${#<A>[@]}",
    r'"${<A>[*]}"',
    r'"${<A>[@]}"',
    r"${<A>[@]}",
    r'x"${<A>[@]:0:2}"y',
    r"${<A>[0]}",
    r'"${<A>[-1]}"',
    r'"${<A>[@]/#--/+}"',
    r"$(echo $<T>)",
    r'"$(echo "$<T>  x")"',
    r"$(printf '%03d' $<N>)",
    r"`echo $<N>`",
    r"a\ b",
    r'"a\"b"',
    r"$'t\tb'",
    r"{a,b}",
    r"x{1..3}y",
    r"x{a,{b,c}d}$<N>",
    r"{1}",
    r"${<T>:=new}",
    r"[0]*2+[1]*6",
    r"a#b",
    r'"run #3"',
    r"a=b",
    r"$#",
    r'"$@"',
    r'"$*"',
    r'""',
    r"$(basename /x/$<T>.sh .sh)",
    r"$(dirname /a/b/c)",
    r'"${<A>[@]:1:2}"',
    r'${NOT_SET-"$<T>"}',
    r"$(seq 1 3)",
    r"$(expr $<N> + 1)",
    r"$(( $(echo $<N>) + 1 ))",
    r'$(if true; then echo "$<T>"; fi)',
    r"${!REF}",
    r"${!REF:-x}",
    r'"${<A>[@]:(-1)}"',
]
_CONDITIONS = [
    r"[ $<N> -gt <D> ]",
    r'[ "$<T>" = small-2 ]',
    r"[[ $<T> == t* ]]",
    r'[ -z "$NOT_SET" ]',
    r'[[ "$<T>" == "t*" ]]',
    r'[[ "$<T>" =~ ^[a-z]+$ ]]',
    r"(( <E> ))",
    r"[[ -n $<T> && $<N> -le 9 ]]",
    r'[ "$<T>" != tiny -a $<N> -lt 9 ]',
    r"! [ $<N> -eq 8 ]",
    r"true",
    r"false",
    r"[[ ${#<A>[@]} -gt 2 ]]",
    r"[[ ! $<T> < b ]]",
    r'[ -n "$1" ]',
    r"[[ $<T> == *.* || <D> -eq 1 ]]",
    r"[ $# -eq 0 ]",
    r"test $<N> -ne 8",
    r'[ ! "$<T>" ]',
    r"[[ ( -z $<T> || $((<E>)) -gt 3 ) && ! $<N> -eq 2 ]]",
    r"[[ $<T> == [a-s]*[!0-9] ]]",
    r"(exit <D>)",
    r"[[ -v NOT_SET ]]",
    r'[ "$<T>" -gt 1 ] 2>/dev/null',
    r"{ [ $<N> -gt 3 ]; }",
]
_PROBED_TEXTS = ["$(probe)", '"$(probe)"', "$(probe)/x", "$((NL + $(probe)))", "${UNKNOWN:-3}", "$UNKNOWN", "x$HOME"]
_PROBED_CONDITIONS = [
    '[ "$(probe)" -gt 3 ]',
    "probe_status",
    "[[ -f /nowhere/x ]]",
    "! probe_status",
    '[ "$(probe)" = 5 ]',
    "[ ! -d /nowhere ]",
]


def _text(word: ProgramWord) -> str | None:
    if word.unknown is None:
        return word.text
    # bash reads a variable that is not set as empty; Pipeloom remembers its name.
    if word.unknown.kind == "unset":
        return word.text.replace(word.unknown.source, "")
    return ANY if word.unknown.kind in ("output", "list") else None


def agrees(ours: list[list[str | None]], theirs: list[list[str]]) -> bool:
    """Whether the known arguments are those of bash, in their places."""
    if len(ours) != len(theirs):
        return False
    for one, other in zip(ours, theirs, strict=True):
        pattern = "".join(
            "(?:[^\0]*\0)*?" if w == ANY else "[^\0]*\0" if w is None else re.escape(f"{w}\0") for w in one
        )
        if re.fullmatch(pattern, "".join(f"{word}\0" for word in other)) is None:
            return False
    return True


class Generator:
    """Writes one script from a seed; ``probing`` ones use commands whose output is unknown."""

    def __init__(self, seed: int, probing: bool = False) -> None:
        self.random = random.Random(seed)
        self.probing = probing
        self.numbers = ["NL"]
        self.texts = ["NAME"]
        self.arrays = ["ARGS"]
        self.functions: list[str] = []
        self.depth = 0
        self.count = 0

    def script(self) -> str:
        pick = self.random.choice
        lines = [
            "#!/bin/bash",
            "NL=8",
            "REF=NAME",
            f"NAME={pick(['tiny', 'small-2', 'a.b.c'])}",
            "ARGS=(--num-layers $NL)",
        ]
        if self.random.random() < 0.2:
            lines.append(pick(["set -e", "set -x", "set -eo pipefail"]))
        for _ in range(self.random.randint(3, 9)):
            lines += self.statement()
        lines += self.launch()
        if self.random.random() < 0.1:
            lines += ["exit 0", "this is ( not parsed"]
        return "\n".join(lines) + "\n"

    # ------------------------------------------------------------------ values

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def integer(self) -> str:
        """An expression within (( ))."""
        r = self.random
        name = r.choice(self.numbers)
        form = r.randint(0, 9)
        if form < 3 or self.depth > 3:
            return r.choice([str(r.randint(0, 40)), name, f"${name}", f"${{{name}}}"])
        self.depth += 1
        left, right = self.integer(), self.integer()
        self.depth -= 1
        return [
            f"({left} + {right})",
            f"{left} * {r.randint(1, 4)}",
            f"({left} - {right})",
            f"({left} / {r.randint(1, 9)})",
            f"({left} % {r.randint(1, 9)})",
            f"({left} > {right} ? {left} : {right})",
            f"({left} < {right})",
        ][form - 3]

    def text(self) -> str:
        """A word without blanks outside of quotes."""
        if self.probing and self.random.random() < 0.25:
            return self.filled(_PROBED_TEXTS)
        found = self.filled(_TEXTS)
        # An array that takes itself in grows too fast in a loop.
        return "plain" if self.depth and re.search(r"\[[@*]\]\}|[$][@*]", found) else found

    def condition(self) -> str:
        if self.probing and self.random.random() < 0.4:
            return self.filled(_PROBED_CONDITIONS)
        return self.filled(_CONDITIONS)

    def filled(self, templates: list[str]) -> str:
        """One of some templates, with names, numbers and an expression in place of T, N, A, D and E."""
        pick = self.random.choice
        found = pick(templates)
        for mark, value in (
            ("<T>", pick(self.texts)),
            ("<N>", pick(self.numbers)),
            ("<A>", pick(self.arrays)),
            ("<D>", str(self.random.randint(0, 20))),
        ):
            found = found.replace(mark, value)
        return found.replace("<E>", self.integer()) if "<E>" in found else found

    # ------------------------------------------------------------------ statements

    def block(self) -> list[str]:
        self.depth += 1
        found = [line for _ in range(self.random.randint(1, 2)) for line in self.statement()]
        self.depth -= 1
        return found

    def simple(self) -> list[str]:
        r = self.random
        array = r.choice(self.arrays)
        if self.random.random() < 0.1:
            return [f"{self.filled(['<T>', '<T>', '<N>x', '<T>'])}={self.text()}"]
        kind = r.randint(0, 15)
        if kind == 0:
            name = self.fresh("N")
            line = f"{name}=$(({self.integer()}))"
            self.numbers.append(name) if not self.depth else None
            return [line]
        if kind == 1:
            return [f"((NL {r.choice(['+=', '=', '-='])} {r.randint(1, 9)})) || :"]
        if kind == 2:
            value = r.choice(["big", '"two words"', "x-1.y", "$NAME$NL", '"$NAME"', "'q'\"r\"s"])
            return [r.choice([f"NAME={value}", f"export NAME={value}", "NAME+=-z.w"])]
        if kind in (3, 4):
            return [f"{array}+=({self.option()} {self.option()})"]
        if kind == 5:
            return [f"{array}+=(", f"    {self.option()}", "    # --swiglu \\", f"    {self.option()} # tail", ")"]
        if kind == 6:
            return [f"# {self.option()} \\", "mkdir --parents logs && pip install --quiet x"]
        if kind == 7:
            return [f"{self.condition()} {r.choice(['&&', '||'])} {array}+=({self.option()}) || :"]
        if kind == 8:
            return ['read -r A B <<< "$NAME $NL rest"', f'{array}+=(--ab "$A" "$B")']
        if kind == 9:
            return ['IFS=, read -ra PARTS <<< "a,b b,$NL"', f'{array}+=("${{PARTS[@]}}")']
        if kind == 10:
            return [f"printf -v NAME '%s-%d' \"$NAME\" {r.randint(0, 9)}"]
        if kind == 11:
            return [f'OPTS="--opt {r.choice(["1", "$NL"])} \\', '    --more"', f"{array}+=($OPTS)"]
        if kind == 12:
            return [
                f"set -- {self.text()} {self.text()}",
                f'{array}+=("$@" $1 "$*" $#)',
                r.choice(["shift", "set --", ":"]),
            ]
        if kind == 13:
            return [f'eval "{array}+=(--evaluated \'\\$NAME\' \\"\\$NL\\")"']
        if kind == 14:
            return ["TEXT=$(cat <<" + r.choice(["EOF", "'EOF'"]), "a $NAME", "  (b", "EOF", ")", f'{array}+=("$TEXT")']
        return [f"unset 'ARGS[{r.randint(1, 3)}]'", f"ARGS[{r.randint(2, 6)}]={self.text()}"]

    def option(self) -> str:
        r = self.random
        return r.choice(
            ["--swiglu", f"--name {self.text()}", f"--size={self.text()}", f'"--pair {r.randint(0, 9)}"', self.text()]
        )

    def statement(self) -> list[str]:
        r = self.random
        if self.depth > 2 or r.random() < 0.55:
            return self.simple()
        kind = r.randint(0, 8)
        if kind == 0:
            found = [f"if {self.condition()}; then", *self.block()]
            if r.random() < 0.5:
                found += [f"elif {self.condition()}", "then", *self.block()]
            if r.random() < 0.6:
                found += ["else", *self.block()]
            return [*found, "fi"]
        if kind == 1:
            subject = r.choice(['"$NAME"', "$NL", "${NOT_SET:-small}"])
            clauses = [*r.sample(["tiny", "small|a*", "[0-9]*", "*-?", '"t*"', "*.c"], 3), "*"]
            found = [f"case {subject} in"]
            for clause in clauses:
                found += [f"{r.choice(['', '('])}{clause})", *self.block(), r.choice([";;", ";;", ";;", ";&", ";;&"])]
            return [*found, "esac"]
        if kind == 2:
            words = r.choice(["1 2 3", "{1..3}", "$(seq 2)", '"${ARGS[@]:0:2}"', 'a "b c"', f"{self.text()}"])
            jump = r.choice(["", f"{self.condition()} && continue", f"if {self.condition()}; then break; fi"])
            return [
                f"for item in {words}; do",
                *self.block(),
                *([jump] if jump else []),
                "ARGS+=(--item $item)",
                "done",
            ]
        if kind == 3:
            name = self.fresh("i")
            return [
                f"for (({name}=0; {name}<{r.randint(1, 4)}; {name}++)); do",
                *self.block(),
                f"ARGS+=(${name})",
                "done",
            ]
        if kind == 4:
            name = self.fresh("k")
            test = r.choice([f"while [ ${name} -lt {r.randint(1, 4)} ]", f"until (( {name} >= {r.randint(1, 3)} ))"])
            return [f"{name}=0", f"{test}; do", *self.block(), f"    {name}=$(({name} + 1))", "done"]
        if kind == 5:
            name = self.fresh("f")
            body = [
                f"{r.choice(['', 'function '])}{name}() {{",
                r.choice(["local NAME=$1", "local NL=3 NAME", "local -a ARGS"]),
                *self.block(),
                'ARGS+=("$@" $#)',
                f"return {r.randint(0, 1)}",
                "}",
            ]
            call = r.choice([f"{name} {self.text()} b || :", f"if {name} 4; then ARGS+=(--yes); fi", ":"])
            return [*body, call]
        if kind == 6:
            return ["(", *self.block(), "NL=99", *(self.launch() if r.random() < 0.3 else []), ")"]
        if kind == 7:
            return ["{", *self.block(), "} 2>/dev/null"]
        name = self.fresh("A")
        line = f"{r.choice(['', 'declare -a '])}{name}=({self.text()} {self.option()} {self.text()})"
        if not self.depth:
            self.arrays.append(name)
        return [line]

    def launch(self) -> list[str]:
        r = self.random
        passed = r.choice(["${ARGS[@]}", '"${ARGS[@]}"', "${ARGS[*]}"])
        line = f"torchrun pretrain_gpt.py {passed} \\\n    --hidden-size {self.text()} {self.option()}"
        return [line + r.choice(["", " 2>&1 | cat", " > /dev/null", " || exit 1", " &\nwait"])]
