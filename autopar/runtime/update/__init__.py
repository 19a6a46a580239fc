"""From reduced gradients to updated parameters: rules, optimizers by parts, clipping, loss scaling, schedulers."""
