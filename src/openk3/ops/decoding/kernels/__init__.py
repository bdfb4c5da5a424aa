"""`openk3.ops.decoding` on the GPU: `products`, `experts` and `rows`; `early` is what they share."""
