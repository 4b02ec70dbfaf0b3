"""What a worker may be able to do, in the order in which the contract lists it."""

from typing import Final, Literal, get_args

Capability = Literal[
    "chat",
    "speech",
    "streaming",
    "image_input",
    "audio_input",
    "video_input",
    "audio_output",
]

CAPABILITIES: Final[tuple[Capability, ...]] = get_args(Capability)
