"""Fetch: every locked input lies in the store, verified, before anything uses one."""
