"""The checkpoint that ``baton up`` serves when no model is named; see README.md in this folder."""

import pathlib


def path() -> pathlib.Path:
    """The folder of the checkpoint, in Hugging Face format."""
    return pathlib.Path(__file__).resolve().parent
