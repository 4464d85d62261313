"""gRPC between routers, drafts and targets: stubs, codecs, servers, clients, errors, tracing. Imports only engine."""
