#!/bin/sh
# Download HF_MODEL at HF_REVISION into the folder BATON_MODEL, unless it is there. The folder gets its name when it is
# complete. Several processes may do this at once; one downloads, and a later one goes on where it was stopped.
# The first process of a container ignores signals without a trap, and a trap waits for what runs in the foreground.
set -eu
run() { "$@" & wait "$!"; }
trap 'kill "$!" || true; exit 143' TERM
[ -e "$BATON_MODEL" ] && exit 0
mkdir -p "$(dirname "$BATON_MODEL")"
exec 9>>"$BATON_MODEL.lock"
run flock 9
[ -e "$BATON_MODEL" ] && exit 0
run hf download "$HF_MODEL" --revision "$HF_REVISION" --local-dir "$BATON_MODEL.part" \
  --include "*.json" --include "model*.safetensors" --include "*.jinja" --include "tokenizer.model"
mv "$BATON_MODEL.part" "$BATON_MODEL"
