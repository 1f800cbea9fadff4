"""Weight files in and out: chunks of fp32 from GGUF or safetensors, and Hugging Face export.

No torch here. Import the submodules: `source` reads, `export` writes.
"""
