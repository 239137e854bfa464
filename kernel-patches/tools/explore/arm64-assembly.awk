# Takes the compiler's output for x86-64 and removes arm64's assembly that is left in it. What has an
# instruction becomes a breakpoint, which ends a run that gets there. Symbols stay.
/^#APP/ { inside = 1; instructions = 0; next }
/^#NO_APP/ { if (instructions) print "\tint3"; inside = 0; next }
inside && (/^\.L[A-Za-z0-9_]+:/ || /^[ \t]*\.(loc|globl|set) /) { print; next }
inside { if ($0 !~ /^[ \t]*(#|\.|$|yield|\/\/)/) instructions++; next }
{ print }
