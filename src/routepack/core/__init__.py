"""The nouns and their checks: what is recorded, what is planned, and on which ranks.

Letters, as everywhere in RoutePack (a name ends in its axes, ``tokens_SLE``):

    S sequences · T recorded rows (tokens fed in) · L MoE layers · E logical experts
    K top-k · P physical expert slots of one expert-parallel (EP) group
    R ranks of one EP group · G EP groups · W data-parallel (DP) ranks
    M microbatches of an optimizer step · N tokens (T plus the last token of each sequence)

All arrays are numpy: planning never needs torch, and ``torch.from_numpy`` shares their
memory where the trainer does. A constructor also takes CPU torch tensors.
"""
