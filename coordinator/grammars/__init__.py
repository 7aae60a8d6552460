"""Constraints on answers, compiled and checked in separate processes before a request runs."""
