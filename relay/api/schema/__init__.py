"""The shape of calls and answers: routes, problems, pages, and the OpenAPI document."""
