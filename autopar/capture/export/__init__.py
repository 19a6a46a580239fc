"""`torch.export` of model and loss under fake tensors, as one flat graph that writes nothing."""
