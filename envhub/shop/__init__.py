"""The `shop` environment: a store in the format of WebShop."""
