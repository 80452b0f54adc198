"""Runs in a container of the image, with the image's Python: standard library, torch and the image's kernels, none of ours."""
