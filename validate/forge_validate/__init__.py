"""The right side of the bar: from a build record to a verdict, and a tag that moves on a pass only."""
