"""What ranks say to one another; the only room beside the trainers that calls torch.distributed."""
