"""The model: from a checkpoint to logits, and from logits to tokens.

`decoder` is the forward pass; read it first. `families` and `config` say what a checkpoint is, `load` and `weights`
fill the decoder, `layers` and `linear` are its parts, `attention/` reads and writes pages. `sampler` selects tokens.
"""
