"""Golden files: the likeliest next tokens of a trusted run at fixed places, with the noise of that run (docs/golden.md).

`document` is the file, `divergence` the measure, `limits` what noise allows; `texts` are cut into prompts, `record` measures a
server on them through `asker`, and `make` is the verb.
"""
