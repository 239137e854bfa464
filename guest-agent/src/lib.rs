//! Wire types that host and guest share.
