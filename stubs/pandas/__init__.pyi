from pandas import util as util
