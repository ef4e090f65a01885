"""The shape of calls and responses: routes, problems, pages, the OpenAPI document."""
