"""A simulated accelerator: CPU tensors behind a device ``sim`` that checks what a GPU would not forgive."""
