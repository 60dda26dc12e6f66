"""The model: from a checkpoint to logits, and from logits to tokens.

`decoder` is the forward pass; read it first. `families` and `config` say what a checkpoint is, `checkpoint` and
`weights` fill the decoder (`baton.engine.load` calls them), `layers` and `linear` are its parts, `attention/` reads and
writes pages. `sampler` selects tokens.
"""
