"""The container engine: find the one that answers, probe it, build with it, install one where none answers."""
