"""The permuted grouped-GEMM MoE layer; imports nothing else of routepack, so it lifts out whole."""
