"""The engine: models, KV blocks, scheduling, verification and drafting on one device. Never imports ray or grpc."""
