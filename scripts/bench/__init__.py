"""The parts of the benchmarks: what is timed, who computes it, its check, its timing, what it should take."""
