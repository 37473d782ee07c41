"""RoutePack in other people's trainers: one hook a stack, Lightning, transformers, and routes recorded live in any model.

The hook of a new stack is one file, copied from ``megatron.py``, the simplest.
"""
