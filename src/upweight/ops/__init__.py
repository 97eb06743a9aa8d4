"""Pure array functions: logprobs, advantages, losses, sampling, masks, packing."""
