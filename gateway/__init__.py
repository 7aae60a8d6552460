"""The HTTP gateway: OpenAI's API, contexts and a web page, in front of a gRPC service. Stateless."""
