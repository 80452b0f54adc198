"""The left side of the bar: from a manifest to an image in staging and its build record."""
