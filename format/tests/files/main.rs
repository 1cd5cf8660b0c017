//! The two files: what they are, and what is refused.

mod common;
mod ptd;
mod pte;
