"""Scheduling: admission, fair queueing, preemption, and the plan of each step."""
