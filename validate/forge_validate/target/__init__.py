"""The target: what is to be validated, in three kinds of one shape. Values only; each kind has a module that makes it.

`record` and `reference` speak to registries, `pull` to the engine; `address` needs neither.
"""

from __future__ import annotations

from typing import Literal

from forge_core.model import Deviation, Frozen, ImageRef, ModelRef, Sha256


class Recorded(Frozen):
    """An image that a build record names, and the model it is to serve. Only this kind can be promoted."""

    target: Literal["recorded"] = "recorded"
    profile: str
    kind: Literal["rehearsal", "production"]
    record: Sha256
    """The record's seal."""
    image: ImageRef
    image_config: str
    architectures: tuple[str, ...]
    """Device code in the image, for example `sm_120a`."""
    model: ModelRef
    """What lies in the model folder, hashed now."""
    deviations: tuple[Deviation, ...]
    """The record's, and the model's own."""


class Image(Frozen):
    """An image without a record of ours, and the model it is to serve."""

    target: Literal["image"] = "image"
    profile: str
    reference: str
    """As it was given; a tag in it may name something else tomorrow."""
    image: ImageRef
    """What it named."""
    model: ModelRef
    """What lies in the model folder, hashed now."""
    deviations: tuple[Deviation, ...] = ()


class Url(Frozen):
    """A server that runs already, whoever started it, wherever."""

    target: Literal["url"] = "url"
    profile: str
    """Names the policy."""
    url: str
    """Without a trailing slash and without `/v1`."""
    served: str
    deviations: tuple[Deviation, ...] = ()


Target = Recorded | Image | Url
