"""Update the weights from the gradients: optimizers, schedule and step guard."""
