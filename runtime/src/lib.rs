//! Runs exported programs.

pub mod text;
