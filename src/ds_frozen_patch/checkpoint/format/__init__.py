"""The files of a checkpoint as bytes: zip archives, pickles, tensors, safetensors."""
