"""Schedules: every candidate of a kernel timed, beside what the cost model estimates and what it chose."""
