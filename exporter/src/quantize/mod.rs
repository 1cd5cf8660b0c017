//! Turns dense weights into codes: which weight gets which encoding ([`Recipe`]), how scales and
//! zero points are chosen ([`Method`]), and how much is lost ([`TensorReport`]).

mod bundle;
mod min_max;
mod recipe;
mod report;
mod row;

pub use bundle::{Existing, write_bundle};
pub use recipe::{Codes, Group, Method, Recipe, Rule, Treatment};
pub use report::{Loss, TensorReport, json, table};
pub(crate) use row::RowQuantizer;
