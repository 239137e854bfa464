#!/bin/sh
# Lists turns that are hard to read in the lines that a change adds: docs/turns.sh [COMMIT], or in
# whole files: docs/turns.sh FILE... A hint, not a gate.
turns='of which|of whom|whoever|nobody|somebody|what hardly|to have it done|is none\b|any more\b'
turns="$turns|\\bmended\\b|\\bas [a-z]+ (have|has) it\\b|(^|[.:] )(What|Who|Why|Whose)[.]"
if [ -f "${1:-}" ]; then
    grep -nHE "$turns" "$@"
else
    git diff -U0 "${1:-HEAD}" -- '*.md' '*.rs' '*.sh' | awk -v turns="$turns" '
        /^\+\+\+ / { file = substr($2, 3) }
        /^@@/ { split($3, at, /[+,]/); line = at[2]; next }
        /^\+/ && !/^\+\+\+/ { print file ":" line++ ": " substr($0, 2) }' | grep -E "$turns"
fi
exit 0
